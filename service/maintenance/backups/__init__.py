"""Backups of a data directory, their restoration, and drills of it.

A backup is a folder: `objects/`, where each file is named by the SHA-256 of its content, and
`backup.json`, which says what the objects are and is written last.
"""
