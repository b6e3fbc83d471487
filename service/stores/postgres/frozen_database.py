"""A database as it is at one moment, for readers over any number of connections.

One transaction exports its snapshot, and all others import it. While they go on, the server cannot
remove the rows that are deleted meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from psycopg import AsyncConnection, Connection

from service.domain.errors import Incompatible, NotFound, Unavailable
from service.stores.postgres.connections import LONG_TIMEOUT, Connections
from service.stores.postgres.notices import Notices, SharedDatabase
from service.stores.postgres.schema import (
    applied_version,
    is_distributed,
    schema_version,
)

_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# A snapshot belongs to one server.
_DISTRIBUTED = (
    "the tables of {} are distributed, and its servers have no moment in common: save each of them "
    "by pg_basebackup and its log, or stop the services and run heed copy --from URL --to DIRECTORY"
)
_NO_TIMEOUT = b"SET idle_in_transaction_session_timeout = 0"


@contextmanager
def frozen_database(url: str) -> Iterator[SharedDatabase]:
    """Open a database for reading, as it is now: whatever is written later is not seen.

    Everything that was committed before this is called is seen. Stores of the database read as
    ever; whatever would write raises `StoreReadOnly`.

    Raises:
        Invalid: the URL is none of PostgreSQL.
        NotFound: the database holds nothing of Heed.
        Incompatible: its schema is not the one of this version of Heed.
        Unavailable: its tables are distributed, or it does not answer.
    """
    connections = Connections(url)
    with connections.plain() as holder:
        _check_schema(holder, connections.name)
        if is_distributed(holder):
            raise Unavailable(_DISTRIBUTED.format(connections.name))
        holder.execute(_NO_TIMEOUT)
        holder.execute(_BEGIN)
        ((snapshot,),) = holder.execute("SELECT pg_export_snapshot()").fetchall()
        frozen = FrozenConnections(url, snapshot)
        database = SharedDatabase(url, frozen, Notices(frozen), users=1)
        try:
            yield database
        finally:
            database.abandon()


class FrozenConnections(Connections):
    """Connections that see what an exported snapshot does, while its transaction goes on."""

    def __init__(self, url: str, snapshot: str) -> None:
        super().__init__(url)
        self._import = f"SET TRANSACTION SNAPSHOT '{snapshot}'".encode()

    @asynccontextmanager
    async def connection(self, patience: float = LONG_TIMEOUT) -> AsyncIterator[AsyncConnection]:
        """`Connections.connection`, within a transaction."""
        async with super().connection(patience) as connection:
            await connection.execute(_BEGIN)
            try:
                await connection.execute(self._import)
                yield connection
            finally:
                await connection.execute(b"ROLLBACK")

    @contextmanager
    def plain(self) -> Iterator[Connection]:
        """`Connections.plain`, within a transaction."""
        with super().plain() as connection:
            connection.execute(_BEGIN)
            connection.execute(self._import)
            yield connection

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """`Connections.session`, within a transaction."""
        with super().session() as connection:
            connection.execute(_NO_TIMEOUT)
            connection.execute(_BEGIN)
            connection.execute(self._import)
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """`Connections.snapshot`, whose transaction imports the snapshot."""
        with super().snapshot() as connection:
            connection.execute(self._import)
            yield connection


def _check_schema(connection: Connection, name: str) -> None:
    found, known = applied_version(connection), schema_version()
    if not found:
        raise NotFound(f"there is nothing of Heed in the database {name}")
    if found != known:
        raise Incompatible(
            f"the database {name} has version {found} of Heed's schema, and this version of Heed "
            f"reads {known}: use the version of Heed that serves it"
        )
