"""Commands of operators: keys, namespaces, integrity, forgotten users, backups and diagnosis.

In come options and the data directory; out go tables, files and exit codes.
"""
