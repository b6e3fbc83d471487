"""Records, queries, errors and settings: the types that all rooms of the service share.

Imports nothing of the other rooms.
"""
