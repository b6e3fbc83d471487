"""Heed's service: it stores histories and catalogues, speaks HTTP and orchestrates the jobs."""

__version__ = "0.2.0"
