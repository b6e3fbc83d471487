"""State of a PostgreSQL server, as far as it decides what Heed can promise: read, never changed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from psycopg import Connection

from service.stores.jobs import Rows
from service.stores.postgres.connections import Connections
from service.stores.postgres.schema import applied_version, schema_version, unfinished_restore

_SETTINGS = (
    "archive_mode",
    "autovacuum",
    "autovacuum_freeze_max_age",
    "data_checksums",
    "fsync",
    "full_page_writes",
    "max_connections",
    "superuser_reserved_connections",
    "synchronous_commit",
    "synchronous_standby_names",
    "track_counts",
)
_READ_SETTINGS = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)"
_ROLE = """\
SELECT current_user, rolsuper, pg_has_role('pg_read_all_stats', 'USAGE')
  FROM pg_roles WHERE rolname = current_user"""
_STANDBYS = """\
SELECT application_name, coalesce(state, ''), coalesce(sync_state, ''),
       coalesce(extract(epoch FROM replay_lag), 0)::float8,
       coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn), 0)::bigint
  FROM pg_stat_replication ORDER BY application_name"""
# Transactions of other databases hold back the horizon of followers too.
_TRANSACTIONS = """\
SELECT pid, coalesce(usename, ''), coalesce(application_name, ''), coalesce(state, ''),
       extract(epoch FROM clock_timestamp() - xact_start)::float8, backend_xid IS NOT NULL
  FROM pg_stat_activity
 WHERE xact_start IS NOT NULL AND backend_type = 'client backend' AND pid <> pg_backend_pid()
   AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL
        OR starts_with(state, 'idle in transaction'))
 ORDER BY xact_start"""
_PREPARED = """\
SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8
  FROM pg_prepared_xacts ORDER BY prepared"""
_SLOTS = """\
SELECT slot_name, coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::bigint
  FROM pg_replication_slots WHERE NOT active ORDER BY slot_name"""
_CONNECTIONS = """\
SELECT count(*) FILTER (WHERE backend_type = 'client backend'),
       count(DISTINCT coalesce(host(client_addr), '')) FILTER (WHERE application_name = 'heed')
  FROM pg_stat_activity"""
_TABLES = """\
SELECT relname, n_live_tup, n_dead_tup FROM pg_stat_user_tables
 WHERE schemaname = 'heed' ORDER BY relname"""
_ONE_ROW = """\
SELECT (SELECT age(datfrozenxid) FROM pg_database WHERE datname = current_database()),
       (SELECT coalesce(sum(checksum_failures), 0)::bigint FROM pg_stat_database),
       (SELECT extract(epoch FROM clock_timestamp() - last_archived_time)::float8
          FROM pg_stat_archiver),
       (SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid())"""
_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


class Standby(NamedTuple):
    """A server that follows this one, as it sees it."""

    name: str
    state: str  # `streaming`, once it has caught up
    sync_state: str  # `sync` or `quorum` where commits wait for it; else `async` or `potential`
    lag_seconds: float
    lag_bytes: int


class OpenTransaction(NamedTuple):
    """A transaction in progress."""

    pid: int
    user: str
    application: str
    state: str  # of its session
    seconds: float
    writes: bool


class TableState(NamedTuple):
    """Rows of one of Heed's tables, or of a partition, by the server's estimates."""

    name: str
    live: int
    dead: int


class ServerState(NamedTuple):
    """A server, a database and a connection to it. Ages are seconds."""

    name: str  # host and database
    host: str  # of the connection; a path, or nothing, for a socket of this machine
    version: int  # 150003 is 15.3
    settings: Mapping[str, str]
    user: str
    is_superuser: bool
    sees_statistics: bool  # of sessions and standbys that are not this user's
    schema: int  # of Heed; 0 for none
    known_schema: int  # by this version of Heed
    unfinished_restore: str | None
    standbys: tuple[Standby, ...]
    transactions: tuple[OpenTransaction, ...]
    prepared: tuple[tuple[str, float], ...]  # transactions: name and age
    unused_slots: tuple[tuple[str, int], ...]  # name, and bytes of the log that it keeps
    connections: int  # of clients
    machines: int  # from which Heed is connected
    tables: tuple[TableState, ...]
    transaction_age: int  # ids since the oldest that is not frozen
    checksum_failures: int
    archived_ago: float | None  # None: no file of the log was ever archived
    has_tls: bool
    clock_ahead: float  # seconds that the server's clock is ahead of this machine's, at least


def read_server(connections: Connections) -> ServerState:
    """Read the state of a database's server. Raises `Unavailable` where it does not answer."""
    with connections.plain() as connection:
        settings: dict[str, str] = dict(_rows(connection, _READ_SETTINGS, _SETTINGS))
        ((user, is_superuser, sees),) = _rows(connection, _ROLE)
        ((age, failures, archived, tls),) = _rows(connection, _ONE_ROW)
        ((count, machines),) = _rows(connection, _CONNECTIONS)
        schema, known = applied_version(connection), schema_version()
        return ServerState(
            name=connections.name,
            host=connection.info.host,
            version=connection.info.server_version,
            settings=settings,
            user=user,
            is_superuser=is_superuser,
            sees_statistics=sees,
            schema=schema,
            known_schema=known,
            unfinished_restore=unfinished_restore(connection) if schema == known else None,
            standbys=tuple(Standby(*row) for row in _rows(connection, _STANDBYS)),
            transactions=tuple(OpenTransaction(*row) for row in _rows(connection, _TRANSACTIONS)),
            prepared=tuple((gid, seconds) for gid, seconds in _rows(connection, _PREPARED)),
            unused_slots=tuple((name, size) for name, size in _rows(connection, _SLOTS)),
            connections=count,
            machines=machines,
            tables=tuple(TableState(*row) for row in _rows(connection, _TABLES)),
            transaction_age=age,
            checksum_failures=failures,
            archived_ago=archived,
            has_tls=bool(tls),
            clock_ahead=_clock_ahead(connection),
        )


def _clock_ahead(connection: Connection) -> float:
    """Return what the round trip of a question does not explain; 0 where it explains all."""
    before = time.time()
    ((there,),) = _rows(connection, _CLOCK)
    after = time.time()
    return float(min(0.0, there - before) or max(0.0, there - after))


def _rows(connection: Connection, query: str, *values: Any) -> Rows:
    return connection.execute(query.encode(), [list(each) for each in values]).fetchall()
