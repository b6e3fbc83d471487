"""Integrity of the store's files: damage to the log, lost changes, files that were replaced.

Comes in: the path of a store, and what its connections read. Goes out: errors that name the file,
reports, and a new store with all rows that are still readable.
"""
