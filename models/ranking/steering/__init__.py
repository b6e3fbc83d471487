"""Steering of a ranking: boosts, items behind all others, pins, quotas and exploration.

Masks and numbers over the rows of the catalogue come in, the order of an answer goes out. Filters
are applied to the catalogue before, by `models.catalogue.item_filter`.
"""
