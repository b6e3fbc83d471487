"""Training from a store: read the log, fit a model, evaluate it, publish it.

Comes in: a store. Goes out: a version in the registry.
"""
