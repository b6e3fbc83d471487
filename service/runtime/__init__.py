"""Processes, threads, signals and durable files.

Comes in: paths, commands, callables. Goes out: bytes that survive power loss, processes that leave
no orphan. Knows no event, model or HTTP.
"""
