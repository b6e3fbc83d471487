"""The catalogue as a model serves it: items, their keys and tables, and the snapshot of all.

Items and a trained model go in; an immutable snapshot that is updated by copy-on-write comes out.
"""
