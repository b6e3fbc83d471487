"""The history encoder: causal attention over events with biases for recency and type.

Embedded events go in; one state for each event comes out.
"""
