"""Manners towards clients: HEAD requests, clients that leave, and bodies that are refused.

Comes in: requests and the state of their connections. Goes out: middleware and context managers.
"""
