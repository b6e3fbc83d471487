"""Readers of public data sets and of your own files, and writers of tables and exports.

Comes in: files in BEIR's, MovieLens' and other public formats, JSON lines, CSV, TSV, Parquet.
Goes out: streams of `Item`, `Event` and `User`, judged queries, files.
"""
