"""Processes, threads, signals and durable files.

Knows nothing of events, models or HTTP.
"""
