"""Model versions on disk and the served snapshot: registry, embeddings, refreshes.

The store's items and a published artifact go in; a `Snapshot` that follows both comes out.
"""
