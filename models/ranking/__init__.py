"""Answers about items: scores, recommendations, search, similar items and explanations.

A snapshot, a memory and a query go in; ranked items with their parts and reasons come out.
"""
