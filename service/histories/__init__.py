"""Histories of users in memory: cached events, the history of a request, and its model memory.

A user and a snapshot go in; a `UserMemory` comes out.
"""
