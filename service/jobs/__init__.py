"""Background jobs: trainings as child processes, their files and their documents.

A request for training goes in; a job that can be watched and cancelled comes out.
"""
