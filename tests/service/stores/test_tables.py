"""Every table of a store is salvaged, copied, compared and removed: the lists name each one."""

from __future__ import annotations

from pathlib import Path

import apsw
import psycopg

from service.stores.postgres import namespaces
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite import check
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.store import SQLiteStore
from service.stores.store_digest import digest_store
from tests.support.postgres_server import PostgresDatabases

COUNTED_AGAIN = {"state", "popularity"}
# The digest by which a copy is compared; None: numbers and notes that a copy makes itself.
DIGESTS = {
    "users": "profiles",
    "items": "items",
    "types": "events",
    "imports": "imports",
    "events": "events",
    "vectors": "events",
    "claims": "events",
    "replaced": "imports",
    "gone_users": None,
    "scenarios": "scenarios",
    "forgotten": "forgotten",
    "unused_names": None,
    "keys": "keys",
}
# Tables of the installation, not of a namespace.
OF_ALL = {"installation", "namespaces", "migrations"}


async def test_tables_of_sqlite(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "heed.db")
    try:
        digests = await digest_store(store)
    finally:
        await store.close()
    connection = apsw.Connection(str(tmp_path / "heed.db"), vfs=checksum_vfs())
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    tables = {name for (name,) in rows}
    connection.close()
    assert {*check._TABLES} == tables - COUNTED_AGAIN
    assert {*DIGESTS} == tables - COUNTED_AGAIN
    assert {name for name in DIGESTS.values() if name} <= {*digests}


async def test_tables_of_postgresql(postgres: PostgresDatabases) -> None:
    url = postgres.create_database()
    await PostgresStore(url, namespace="shop", patience=20.0).close()
    with psycopg.connect(url) as database:
        tables = {
            name
            for (name,) in database.execute(
                "SELECT relname FROM pg_class WHERE relnamespace = 'heed'::regnamespace"
                " AND relkind IN ('r', 'p') AND NOT relispartition"
            )
        }
    assert {*namespaces._TABLES} == tables - OF_ALL
