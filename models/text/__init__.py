"""Texts as vectors and as terms: encoders for meaning, BM25 for words.

Strings go in; vectors, or scores of documents, come out.
"""
