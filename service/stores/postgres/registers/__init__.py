"""Registers of a PostgreSQL store: scenarios and API keys.

Come in records to store; go out the records of a name, in their versions.
"""
