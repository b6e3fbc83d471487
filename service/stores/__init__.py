"""Stores of histories, profiles and the catalogue: one protocol, implemented by each engine.

Comes in: validated records. Goes out: the same records, once they are durable.
"""
