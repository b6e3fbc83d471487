"""Parts of a PostgreSQL database that machines share beside the records: files, and jobs.

Comes in: names and bytes. Go out: the same bytes, verified, on any machine.
"""
