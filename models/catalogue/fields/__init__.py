"""Typed columns of item fields, which filters, facets and sorting read.

Item entries go in; frozen columns that are updated by copy-on-write come out. A field has up to
three columns: keywords (strings, booleans, null), numbers and points. Columns are filled when items
are added, so that no request builds one: 4 bytes an item for strings, 8 for numbers, 16 for points,
as much again where many items have a second value, and the values themselves where few items have
any.
"""
