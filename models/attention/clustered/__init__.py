"""Attention over very long memories by clusters of rows, to an error that the caller states.

Keys, values and weights go in; a partial softmax with an estimated error comes out.
"""
