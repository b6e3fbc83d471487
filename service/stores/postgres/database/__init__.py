"""Connections to a PostgreSQL database, its schema and transactions, and its errors as Heed's.

Comes in: a `postgresql://` URL. Go out: connections and transactions.
"""
