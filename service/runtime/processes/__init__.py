"""Processes: workers that share a port, messages between them, children, and the end of a process.

In come functions and command lines; out go processes that are watched, replaced and stopped.
"""
