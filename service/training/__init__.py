"""Training from a store: the log is read, a model is fitted, evaluated and published.

A store goes in; a version in the registry comes out.
"""
