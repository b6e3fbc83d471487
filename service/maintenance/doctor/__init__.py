"""Diagnosis of an installation: checks that read, change nothing, and return findings."""
