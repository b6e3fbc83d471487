"""The store in one SQLite database: schema, connections, one writer, histories.

Validated records come in; the same records go out, once they are durable.
"""
