"""Imports of a PostgreSQL store: their records, their claims on events, and their undoing.

Come in the numbers of imports with what they store; go out the counts of what was taken back.
"""
