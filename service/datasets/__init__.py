"""Readers of your own files, their import into a store, and writers of tables and exports.

Comes in: JSON lines, CSV, TSV and Parquet; `movielens.py` fetches MovieLens in its own format.
Goes out: streams of `Item`, `Event` and `User`, judged queries, stored records, files.
"""
