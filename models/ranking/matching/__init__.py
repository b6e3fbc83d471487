"""Logits of search: a query compared with the fields and the keywords of items.

In: a parsed query, its vector and a snapshot. Out: the logit of every key that may matter.
"""
