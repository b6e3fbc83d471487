"""The script that distributes a database over Citus, as far as an ordinary server shows it."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from service.stores.postgres.schema import migrate
from tests.support.postgres_server import PostgresDatabases

SCRIPT = Path(__file__).parents[3] / "deploy" / "citus.sql"


@pytest.fixture(scope="module")
def url(postgres: PostgresDatabases) -> str:
    """The URL of a database with the schema."""
    made = postgres.create_database()
    with psycopg.connect(made, autocommit=True) as connection:
        migrate(connection)
    return made


def test_every_table_of_users_is_distributed(url: str) -> None:
    """The script names each table with a key of users or events, and no table that is not there."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT DISTINCT relname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid"
            " WHERE relnamespace = 'heed'::regnamespace AND relkind IN ('r', 'p')"
            " AND NOT relispartition AND attname IN ('user_key', 'event_key')"
        ).fetchall()
    script = SCRIPT.read_text("utf-8")
    placed = [
        line.split("'heed.")[1].split("'")[0] for line in script.splitlines() if "_key'" in line
    ]
    assert sorted(placed) == sorted(name for (name,) in rows)


def test_a_database_without_the_extension_is_refused(url: str) -> None:
    """The script says what an ordinary database lacks, and changes nothing."""
    with psycopg.connect(url, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.RaiseException, match="CREATE EXTENSION citus"):
            connection.execute(SCRIPT.read_bytes())
        found = connection.execute(
            "SELECT relkind FROM pg_class WHERE oid = 'heed.events'::regclass"
        ).fetchone()
    assert found == ("p",)
