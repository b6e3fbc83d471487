"""Maintenance of a data directory: backups, restores, drills, and the diagnosis of faults."""
