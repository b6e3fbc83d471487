"""The event log of a PostgreSQL store: appending, histories, changes, scans and counts.

Come in events and users' ids; go out histories, columns of the log, and counts by item.
"""
