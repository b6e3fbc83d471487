"""Files of model versions: their manifest, their staging, and their way between machines.

Comes in: the files of a version, from a publisher or from the database. Goes out: a directory that
is complete, or none.
"""
