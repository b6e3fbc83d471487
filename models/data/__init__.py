"""Interactions and their arrays: logs of events, vocabularies, windows and sets of rows.

Columns of events go in; arrays for training, evaluation and scoring come out.
"""
