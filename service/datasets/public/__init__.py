"""Readers of public data sets: MovieLens, Online Retail, PyVideo, and collections with judgments.

Comes in: files in BEIR's, MovieLens' and other public formats, fetched or in a folder.
Goes out: streams of `Item` and `Event`, judged queries.
"""
