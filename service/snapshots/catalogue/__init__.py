"""Catalogues of stored items: computed from changes of the store, and cached on disk.

Items and their changes go in; versions of `models.catalogue.Catalogue` come out.
"""
