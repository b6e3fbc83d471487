"""Recommendations for all users of a store, or of a shard of them, written to one file.

A query and a path come in; a file with the lists, ordered by user id and rank, goes out. A run that
is killed is continued by the next one.
"""
