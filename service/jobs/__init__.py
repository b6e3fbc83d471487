"""Training jobs: child processes of the service, one at a time.

Comes in: options of a training. Goes out: a job that can be watched and cancelled.
"""
