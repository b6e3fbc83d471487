"""Distribution of a database over the workers of a Citus cluster.

Which tables are on workers, which worker has a row, and how calls to a worker that does not answer
are kept from holding up the others.
"""
