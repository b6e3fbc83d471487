"""Monitoring: what operators read of an engine, its readiness and its measurements.

The parts of the service come in; the results of checks and numbers for metrics go out.
"""
