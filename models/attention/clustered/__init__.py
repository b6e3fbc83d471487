"""Attention over very long memories by clusters of rows, to an error that the caller states.

Rows of keys and values go in; a partial softmax with an estimated error comes out.
"""
