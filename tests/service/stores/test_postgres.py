"""The PostgreSQL store: the store contract on a real server."""

import pytest

from tests.support.postgres_contract import PostgresContract
from tests.support.postgres_server import PostgresDatabases


@pytest.fixture(scope="module")
def url(postgres: PostgresDatabases) -> str:
    """The URL of a database for all tests of a file, each of which has a namespace of its own."""
    return postgres.create_database()


class TestPostgresStore(PostgresContract):
    """The store contract in namespaces of a PostgreSQL database."""
