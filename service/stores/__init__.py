"""Stores of histories, profiles and the catalogue: one protocol, one implementation per database.

SQLite is the embedded one, PostgreSQL the one of installations with several machines. A new store
implements `base.Store`, has a test class that inherits `StoreContract` of
`tests/support/store_contract.py`, and is opened in `service/engine/compose.py` and
`service/cli/console.py`.

Comes in: validated records. Goes out: the same records, once they are durable.
"""
