"""Parts of the protocol of stores, which `service.stores.base.Store` inherits: a file for each.

Validated records come in; the same records and these files' values go out.
"""
