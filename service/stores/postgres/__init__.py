"""The store of installations with several machines: one PostgreSQL database for all replicas.

Every table's key begins with the namespace and, where rows belong to a user, with the user: one
user's rows are one short range, and the same schema can be distributed by user.

Comes in: validated records. Goes out: the same records, once the server has committed them.
"""
