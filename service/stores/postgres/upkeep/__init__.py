"""Upkeep of a PostgreSQL database: one state of it for backups, and checks of what it holds.

Comes in: a URL, or connections. Go out: stores that are read as of one moment, and findings.
"""
