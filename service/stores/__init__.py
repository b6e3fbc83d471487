"""Stores of histories, profiles and the catalogue: one protocol, one implementation per database.

A new store implements `base.Store`, passes `tests/support/store_contract.py`, and is opened in
`engine/compose.py` and `cli/console.py`.

Comes in: validated records. Goes out: the same records, once they are durable.
"""
