"""Imports of a SQLite store: their records and claims, what they replaced, and their undoing.

Comes in: the transaction of a write. Goes out: rows that tell which import stored what.
"""
