"""Maintenance of a data directory or database: backups, restores, copies, and the doctor."""
