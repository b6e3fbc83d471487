"""Readers of your own files, whatever their dialect and the names of their columns.

Comes in: JSON lines, CSV and Parquet, and how their columns map to fields.
Goes out: checked `Item`, `Event`, `User` and `Judgment` records, the bad rows, and what was found
out about a file.
"""
