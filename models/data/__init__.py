"""Event logs, id vocabularies and training windows, all as NumPy arrays.

Columns of events go in; arrays for training, evaluation and scoring come out.
"""
