"""The items that a question is about: filters, facets, lists in the order of fields, warnings.

Queries and a snapshot come in; masks of item rows, counts and pages go out.
"""
