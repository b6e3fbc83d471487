"""Diagnosis of an installation: small checks that read, change nothing, and return findings.

A check takes an `Installation` (or one of its namespaces) and yields a `Finding` for each fault:
what is wrong, why it matters, and what to do. `diagnose` runs them all.
"""
