"""Registers of a SQLite store: small tables beside the log and the catalogue.

In come jobs of the writer and queries of a reader; out go scenarios, API keys
and the popularity of items.
"""
