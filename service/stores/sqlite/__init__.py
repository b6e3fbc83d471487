"""The store in one SQLite database: schema, connections, one writer, a file for each record type.

Validated records come in; the same records go out, once they are durable.
"""
