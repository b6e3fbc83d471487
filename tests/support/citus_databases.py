"""Databases on all nodes of a Citus cluster, with Heed's tables distributed over its workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from service.stores.postgres.schema import migrate
from tests.support.postgres_server import PostgresDatabases

MISSING = (
    "set HEED_TEST_CITUS=postgresql://user@host/database: a database on the coordinator of a Citus "
    "cluster with at least two workers (CREATE EXTENSION citus on each node, SELECT "
    "citus_set_coordinator_host(…) and citus_add_node(…) on the coordinator). The user must be a "
    "superuser whom every node lets in with the same password; databases are created beside the "
    "named one, and dropped at the end."
)
SHARDS = 8
SCRIPT = Path(__file__).parents[2] / "deploy" / "citus.sql"
_NODES = """\
SELECT groupid, nodename, nodeport FROM pg_dist_node
 WHERE isactive AND noderole = 'primary' ORDER BY groupid"""


class CitusDatabases(PostgresDatabases):
    """A cluster in which tests create databases, on the coordinator and on all workers.

    Args:
        coordinator: URL of a database on the coordinator, which knows the workers.
        prefix: with which every database that is created starts.
        shards: of each table in a new database; None to create none of Heed's tables.

    Raises:
        ValueError: the database has no workers; the message says what is needed.
    """

    def __init__(self, coordinator: str, prefix: str = "", shards: int | None = SHARDS) -> None:
        super().__init__(coordinator, prefix)
        self._shards = shards
        with psycopg.connect(coordinator, autocommit=True) as connection:
            try:
                nodes = connection.execute(_NODES).fetchall()
            except psycopg.errors.UndefinedTable:
                nodes = []
        self.workers: dict[int, tuple[str, int]] = {
            group: (host, port) for group, host, port in nodes if group
        }
        own = urlsplit(coordinator)
        self._coordinator = own.hostname or "localhost", own.port or 5432
        if len(self.workers) < 2:
            raise ValueError(f"{coordinator} has {len(self.workers)} workers: {MISSING}")

    def worker_url(self, url: str, group: int) -> str:
        """Return the URL of a database's part on one worker."""
        host, port = self.workers[group]
        parts = urlsplit(url)
        user, _, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}@{host}:{port}" if user else f"{host}:{port}").geturl()

    def create_database(self, name: str = "") -> str:
        """Create a database with the extension on each node, and distribute Heed's tables."""
        url = super().create_database(name)
        database = sql.Identifier(urlsplit(url).path[1:])
        for group in self.workers:
            with self._maintenance(group) as connection:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(database))
        for node in (url, *(self.worker_url(url, group) for group in self.workers)):
            with psycopg.connect(node, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION citus")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SELECT citus_set_coordinator_host(%s, %s)", self._coordinator)
            for host, port in self.workers.values():
                connection.execute("SELECT citus_add_node(%s, %s)", (host, port))
            if self._shards is not None:
                migrate(connection)
                distribute(connection, self._shards)
        return url

    def drop_databases(self) -> None:
        """Drop every database that was created here, on every node."""
        for name in self._created:
            for group in self.workers:
                with self._maintenance(group) as connection:
                    database = sql.Identifier(name)
                    statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
                    connection.execute(statement.format(database))
        super().drop_databases()

    @contextmanager
    def _maintenance(self, group: int) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.worker_url(self.url(), group), autocommit=True) as connection:
            yield connection


def distribute(connection: psycopg.Connection, shards: int) -> None:
    """Run the script that distributes the tables, over a connection with autocommit."""
    connection.execute("SELECT set_config('heed.shards', %s, false)", (str(shards),))
    connection.execute(SCRIPT.read_bytes())
