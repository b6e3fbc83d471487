"""Versions of the model on disk and the one that is served: registry, embeddings, live snapshot.

The store's items and a published artifact go in; a `Snapshot` that follows both comes out.
"""
