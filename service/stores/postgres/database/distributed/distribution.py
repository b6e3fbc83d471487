"""Distribution of a PostgreSQL store's tables over the workers of a Citus cluster.

Rows of users and of their events are on workers, one user's on one of them. The rest is small, and
stays on the coordinator: what every write needs, such as the numbers of items, must not wait for a
worker that is down, as a table of which each worker has a copy would.
"""

from __future__ import annotations

from collections.abc import Mapping

from psycopg import Connection

from service.domain.errors import Conflict, Invalid

# Tables in the order in which they are distributed, and the column whose hash places a row. Tables
# that share a column are colocated: equal values are on one worker.
DISTRIBUTED: Mapping[str, str] = {
    "users": "user_key",
    "gone_users": "user_key",
    "events": "user_key",
    "vectors": "user_key",
    "claims": "user_key",
    "replaced_profiles": "user_key",
    "tallies": "user_key",
    "event_ids": "event_key",
}
# Tables that stay on the coordinator.
LOCAL = frozenset(
    (
        "active_sets",
        "copies",
        "file_chunks",
        "file_sets",
        "forgotten",
        "imports",
        "installation",
        "items",
        "job_leases",
        "jobs",
        "keys",
        "migrations",
        "namespaces",
        "rate_windows",
        "replaced_items",
        "scenarios",
        "types",
        "unused_names",
    )
)

_HAS_CITUS = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"
_IS_DISTRIBUTED = "SELECT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = %s::regclass)"
_WORKERS = "SELECT count(*) FROM pg_dist_node WHERE isactive AND shouldhaveshards"
_OTHERS = """\
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend'
   AND NOT starts_with(lower(application_name), 'citus') AND pid <> pg_backend_pid()"""
_SHARDS = """\
SELECT nodename || ':' || nodeport AS worker, count(*)
  FROM pg_dist_shard JOIN pg_dist_placement USING (shardid) JOIN pg_dist_node USING (groupid)
 WHERE logicalrelid = 'heed.users'::regclass AND noderole = 'primary'
 GROUP BY worker ORDER BY worker"""
# Citus spreads the rows by itself: partitions within each shard would only be many more tables.
_JOIN_PARTITIONS = (
    "ALTER TABLE heed.events RENAME TO partitioned_events",
    "ALTER INDEX heed.events_pkey RENAME TO partitioned_events_pkey",
    "CREATE TABLE heed.events (LIKE heed.partitioned_events INCLUDING ALL)",
)
_FILL_EVENTS = (
    "INSERT INTO heed.events SELECT * FROM heed.partitioned_events",
    "DROP TABLE heed.partitioned_events",
)


def is_distributed(connection: Connection, table: str = "users") -> bool:
    """Report whether a table of the schema, which exists, is distributed."""
    return _is_true(connection, _HAS_CITUS) and _is_true(
        connection, _IS_DISTRIBUTED, f"heed.{table}"
    )


def distribute(connection: Connection, shards: int) -> bool:
    """Distribute the tables, with their rows, in one transaction; False if they are already.

    Args:
        connection: with autocommit, to the coordinator, as the owner of the schema.
        shards: of each table.

    Raises:
        Invalid: the database does not have the extension citus, or the cluster has no workers.
        Conflict: other clients are connected.
        psycopg.Error: Citus refuses, or a worker does not answer; nothing is changed then.
    """
    if not _is_true(connection, _HAS_CITUS):
        raise Invalid("", "the database has no extension citus: CREATE EXTENSION citus, first")
    if is_distributed(connection):
        return False
    if not _count(connection, _WORKERS):
        raise Invalid("", "the cluster has no workers: SELECT citus_add_node(…), first")
    connection.execute("SET statement_timeout = 0")  # every row moves
    with connection.transaction():
        tables = ", ".join(f"heed.{table}" for table in DISTRIBUTED)
        connection.execute(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE".encode())
        if _count(connection, _OTHERS):
            raise Conflict("others are connected to the database: stop all of Heed's processes")
        for statement in _JOIN_PARTITIONS:
            connection.execute(statement.encode())
        _distribute(connection, shards)
        for statement in _FILL_EVENTS:
            connection.execute(statement.encode())
    return True


def count_shards(connection: Connection) -> list[tuple[str, int]]:
    """Return the workers, as host:port, and how many shards of each table they have."""
    return connection.execute(_SHARDS.encode()).fetchall()


def distribute_new_tables(connection: Connection) -> None:
    """Distribute, in a transaction, tables that a migration has added to a distributed schema."""
    _distribute(connection, None)


def _distribute(connection: Connection, shards: int | None) -> None:
    first: dict[str, str] = {}  # table of each column
    for table, column in DISTRIBUTED.items():
        beside = f"heed.{first[column]}" if column in first else "none"
        first.setdefault(column, table)
        if is_distributed(connection, table):
            continue
        connection.execute(
            "SELECT create_distributed_table(%s, %s, colocate_with => %s, shard_count => %s)",
            (f"heed.{table}", column, beside, shards if beside == "none" else None),
        )
        # Its rows are on the workers now; those that the coordinator had are left over.
        connection.execute(
            "SELECT truncate_local_data_after_distributing_table(%s)", (f"heed.{table}",)
        )


def _is_true(connection: Connection, query: str, *values: object) -> bool:
    return connection.execute(query.encode(), values).fetchone() == (True,)


def _count(connection: Connection, query: str, *values: object) -> int:
    row = connection.execute(query.encode(), values).fetchone()
    return 0 if row is None else int(row[0])
