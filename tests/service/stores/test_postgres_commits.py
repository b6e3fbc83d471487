"""Commits of a PostgreSQL store that the server answers with a warning."""

from __future__ import annotations

import psycopg
import pytest

from service.domain.errors import Unavailable
from service.domain.records import Event
from service.stores.postgres.store import PostgresStore
from tests.support.postgres_server import PostgresDatabases

pytestmark = pytest.mark.anyio
WARN = """\
CREATE FUNCTION heed.warn() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE WARNING 'canceling wait for synchronous replication'; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER warn AFTER INSERT ON heed.tallies
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION heed.warn()"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_commit_with_a_warning_is_not_acknowledged(postgres: PostgresDatabases) -> None:
    """A write that is committed but maybe not safe everywhere is refused, and its retry is not."""
    url = postgres.create_database()
    store = PostgresStore(url)
    event = Event("u", "i", "e")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(WARN.encode())
        with pytest.raises(Unavailable, match="synchronous replication; the write may have succ"):
            await store.append([event])
        connection.execute("DROP TRIGGER warn ON heed.tallies")
    assert await store.append([event]) == (0, 1)
    assert (await store.history("u")).item_ids == ["i"]
    await store.close()
