"""Connections of a process to one PostgreSQL database.

Calls run on the event loop they are made on, each over a connection of that loop's pool. Whatever
reads at length has a connection of its own, since it runs on a thread.

A standby that is promoted begins a new timeline. The former primary may hang with connections that
stay open, or go on as a primary: the new one does not have what it would acknowledge. So a process
that has seen the newer timeline has nothing more to do with the older one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool as ReaderPool

from service.domain.errors import Invalid, Unavailable
from service.stores.postgres.faults import explain, is_disconnected
from service.stores.postgres.pool import Leases, PatientConnection, cut_after, cut_off
from service.stores.postgres.schema import is_distributed
from service.stores.postgres.ticks import TIMELINE, raise_base, raise_base_async

POOL_SIZE = 8  # connections of an event loop
DISTRIBUTED_POOL_SIZE = 16  # of a distributed database, which takes longer to answer each call
MAX_SNAPSHOTS = 8  # connections of the threads of a process
STATEMENT_TIMEOUT_MS = 30_000
SESSION_TIMEOUT_MS = 10_000
QUICK_TIMEOUT = 0.5  # seconds of what a request waits for
LONG_TIMEOUT = 60.0  # seconds of what may read at length
_SETUP_TIMEOUT = 3.0  # seconds of the first statements of a connection

# A server that hangs is noticed by these, and not by the operating system after minutes.
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 3,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
    "application_name": "heed",
    "target_session_attrs": "read-write",
}

# A plan for the very user touches one partition of the events; a generic one would lock all.
_PARTITIONED = "SET plan_cache_mode = force_custom_plan"
# One connection to each worker: to open more takes longer than what they would do in parallel, and
# only a single one has one snapshot of its worker. Shards are written one after another, so that
# two transactions lock users in one order. A transaction's settings hold on workers too.
# A connection that was cut while it waited for a worker would otherwise stay with the coordinator
# for as long as the worker hangs, and one more each time that the worker is tried.
_DISTRIBUTED = """\
SET client_connection_check_interval = '1s';
SET citus.max_adaptive_executor_pool_size = 1;
SET citus.multi_shard_modify_mode = 'sequential';
SET citus.propagate_set_commands = 'local'"""


class Connections:
    """Opens connections to the database of a URL.

    Raises `Invalid` for a URL that is none.
    """

    def __init__(self, url: str, *, pool_size: int = POOL_SIZE) -> None:
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            raise Invalid("", f"HEED_STORE is no URL of PostgreSQL: {error}") from None
        self._conninfo = make_conninfo("", **{**_DEFAULTS, **given})
        self._leases = Leases(self._connect, pool_size)
        self._threads: ReaderPool[Connection] | None = None
        self._lock = threading.Lock()
        self._timelines = Timelines()
        self.is_distributed = False
        self.is_closed = False
        self._failures = 0  # of connections that are not lent

    @property
    def name(self) -> str:
        """The host and the database, without a password."""
        given = conninfo_to_dict(self._conninfo)
        return f"{given.get('host', 'localhost')}/{given.get('dbname', '')}"

    @property
    def failures(self) -> int:
        """Number of connections and statements that failed."""
        return self._failures + self._leases.failures

    @property
    def epoch(self) -> int:
        """A number that changes when the database may lack what was read of it before."""
        return self._timelines.changes

    def recognise(self, connection: Connection) -> None:
        """Find out whether the tables are distributed; before the first connection is lent."""
        if not self.is_distributed and is_distributed(connection):
            self.is_distributed = self._leases.is_distributed = True
            self._leases.size = DISTRIBUTED_POOL_SIZE

    def connection(
        self, patience: float = LONG_TIMEOUT
    ) -> AbstractAsyncContextManager[AsyncConnection]:
        """Lend a connection in autocommit mode for a block.

        A connection with which the block takes longer than `patience` seconds is cut, so that the
        block fails.

        Raises:
            StoreUnreachable: no connection can be had, it was lost or cut, or the breaker is open.
            Unavailable: another error of PostgreSQL; errors of the block are translated too.
        """
        self.check_open()
        return self._leases.lease(patience)

    @contextmanager
    def plain(self) -> Iterator[Connection]:
        """Open a connection in autocommit mode, only for this block."""
        self.check_open()
        try:
            with self.connect() as connection:
                yield connection
        except psycopg.Error as error:
            self._failures += 1
            raise explain(error) from error

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """Open a connection as `plain` does, for statements of seconds at most.

        A server that hangs is given up: its connection is cut, so that the block fails.
        """
        self.check_open()
        try:
            with PatientConnection.connect(self._ordered(), autocommit=True) as connection:
                connection.execute(f"SET statement_timeout = {SESSION_TIMEOUT_MS}".encode())
                yield connection
        except psycopg.Error as error:
            self._failures += 1
            raise explain(error) from error

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Lend a thread a connection in one read-only transaction.

        All of its statements see the database as it is at the first one.
        """
        self.check_open()
        try:
            with self._readers().connection() as connection, connection.transaction():
                yield connection
        except psycopg.Error as error:
            self._failures += 1
            raise explain(error) from error

    def connect(self) -> Connection:
        """Open a connection in autocommit mode. Raises `psycopg.Error`."""
        connection = Connection.connect(self._ordered(), autocommit=True)
        try:
            with cut_after(_SETUP_TIMEOUT, connection):
                connection.execute(f"SET statement_timeout = {STATEMENT_TIMEOUT_MS}".encode())
                self._admit(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def check_open(self) -> None:
        """Raise `Unavailable` after `close`."""
        if self.is_closed:
            raise Unavailable("the store is closed")

    async def close(self) -> None:
        """Close all connections; later calls raise `Unavailable`."""
        self._leases.close()
        await asyncio.to_thread(self.abandon)

    def abandon(self) -> None:
        """Close the connections of threads and of loops that have ended."""
        self.is_closed = True
        self._leases.drop_ended()
        if self._threads is not None:
            self._threads.close()

    def _readers(self) -> ReaderPool[Connection]:
        with self._lock:
            if self._threads is None:
                self._threads = ReaderPool(
                    self._ordered,
                    kwargs={"autocommit": True},
                    min_size=0,
                    max_size=MAX_SNAPSHOTS,
                    max_idle=60,
                    configure=self._configure_reader,
                    open=True,
                )
            return self._threads

    async def _connect(self) -> AsyncConnection:
        connection = await AsyncConnection.connect(self._ordered(), autocommit=True)
        connection.prepare_threshold = 2
        guard = asyncio.get_running_loop().call_later(_SETUP_TIMEOUT, cut_off, connection)
        own = _DISTRIBUTED if self.is_distributed else _PARTITIONED
        try:
            await connection.execute(
                f"SET statement_timeout = {STATEMENT_TIMEOUT_MS}; {own}".encode()
            )
            try:
                row = await (await connection.execute(TIMELINE)).fetchone()
            except psycopg.Error as error:
                if is_disconnected(error):
                    raise
                row = None  # the server tells nobody, so nothing can be fenced off
            if row is not None and self._timelines.is_elsewhere(row):
                await raise_base_async(connection, row)
            if self._timelines.admit(connection, row):
                self._leases.drop_idle()
        except BaseException:
            connection.pgconn.finish()
            raise
        finally:
            guard.cancel()
        return connection

    def _configure_reader(self, connection: Connection) -> None:
        connection.execute("SET statement_timeout = 0")
        if self.is_distributed:
            connection.execute(_DISTRIBUTED.encode())
        self._admit(connection)
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True

    def _admit(self, connection: Connection) -> None:
        try:
            row = connection.execute(TIMELINE).fetchone()
        except psycopg.Error as error:
            if is_disconnected(error):
                raise
            row = None
        if row is not None and self._timelines.is_elsewhere(row):
            raise_base(connection, row)
        self._timelines.admit(connection, row)

    def _ordered(self) -> str:
        """Return the URL with the server first that is the primary as far as is known.

        Others may hang, which takes their timeout, or be primaries of earlier timelines.
        """
        return put_first(self._conninfo, self._timelines.primary)


_OF_SERVERS = ("host", "hostaddr", "port")  # each a list, of as many as there are servers


class Timelines:
    """The newest timeline of each server that was seen, and the open connections of a process.

    Attributes:
        changes: number of times that a server was promoted or restarted, or that other servers
            were found in its place, so that it may lack what was read before without being
            committed safely.
        primary: host and port of the newest connection.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.primary: tuple[str, str] | None = None
        self._lock = threading.Lock()
        self._system: int | None = None  # identifier of the servers of the newest connection
        self._newest: dict[int, tuple[int, datetime]] = {}
        self._open: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    def is_elsewhere(self, row: tuple[Any, ...]) -> bool:
        """Report whether a new connection is to other servers, or a newer timeline, than before.

        Args:
            row: as `TIMELINE` returned it on the connection.
        """
        system, timeline, _ = row
        if not timeline or self._system is None:
            return False
        return bool(system != self._system or timeline > self._newest[system][0])

    def admit(self, connection: Connection | AsyncConnection, row: tuple[Any, ...] | None) -> bool:
        """Note a new connection with what `TIMELINE` returned on it; cut those it replaces.

        Returns:
            bool: whether earlier connections are to other servers, or to an older timeline.

        Raises:
            psycopg.OperationalError: another server has become the primary in its stead.
        """
        if row is None or not row[1]:
            return False
        system, timeline, started = row
        with self._lock:
            newest, latest = self._newest.get(system, (timeline, started))
            is_elsewhere = self.is_elsewhere(row)
            if timeline < newest:
                raise psycopg.OperationalError("another server was promoted in place of this one")
            self.changes += is_elsewhere or (timeline, started) != (newest, latest)
            self._newest[system] = timeline, started
            self._system = system
            self.primary = connection.info.host, str(connection.info.port)
            former = [
                each
                for each, (other, number) in self._open.items()
                if other == system and number < timeline
            ]
            for each in former:
                del self._open[each]
            self._open[connection] = system, timeline
        for each in former:
            cut_off(each)
        return is_elsewhere


def put_first(conninfo: str, server: tuple[str, str] | None) -> str:
    """Return a connection string of several servers with one first that is among them."""
    given = conninfo_to_dict(conninfo)
    lists = {name: str(given[name]).split(",") for name in _OF_SERVERS if given.get(name)}
    hosts = lists.get("host", [])
    ports = lists.get("port", ["5432"])
    servers = list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False))
    if server is None or server not in servers[1:]:
        return conninfo
    at = servers.index(server)
    for values in lists.values():
        if len(values) == len(servers):
            values.insert(0, values.pop(at))
    return make_conninfo(conninfo, **{name: ",".join(each) for name, each in lists.items()})
