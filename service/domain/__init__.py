"""Records, queries, errors and settings: the types that all rooms of the service share.

Comes in: values from routes, readers and the environment. Goes out: frozen, validated records.
Imports no other room.
"""
