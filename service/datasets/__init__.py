"""Readers of your own files, their import into a store, and writers of tables and exports.

Comes in: JSON lines, CSV, TSV and Parquet; `public/` reads public data sets in their own formats.
Goes out: streams of `Item`, `Event` and `User`, judged queries, stored records, files.
"""
