"""Copying of a store to another one, in SQLite or PostgreSQL, and comparison of the two.

In come the places of two stores; the target holds what the source does, or it is said what differs.
"""
