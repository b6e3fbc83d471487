"""The PostgreSQL store over distributed tables: the store contract on a real cluster."""

from tests.support.postgres_contract import PostgresContract


class TestDistributedStore(PostgresContract):
    """The store contract in namespaces of a distributed database."""

    patience = 20.0  # of statements that a cluster on one machine answers
