"""Bulk reads and writes of a SQLite store, by which one store is copied to another.

Whole users and items come in and go out, with the rows that belong to them.
"""
