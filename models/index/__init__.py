"""Coarse retrieval: approximate nearest-neighbour indexes over keys, and their exact re-ranking.

Vectors and queries go in; candidate rows come out, best first.
"""
