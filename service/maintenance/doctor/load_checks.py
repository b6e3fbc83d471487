"""Checks of what a PostgreSQL server is busy with: standbys, sessions, connections and vacuum."""

from __future__ import annotations

from collections.abc import Iterator

from service.maintenance.doctor.findings import Finding
from service.stores.postgres.connections import MAX_SNAPSHOTS, POOL_SIZE
from service.stores.postgres.server_state import OpenTransaction, ServerState

_LAG_SECONDS = 30.0
_LAG_BYTES = 256 << 20
_LONG_SECONDS = 300.0  # of a transaction
_IDLE_SECONDS = 60.0  # of one whose session does nothing
_FULL = 0.8  # of the connections
_OTHERS = 3  # connections of a process besides pools: notices, a training, a command
_DEAD_ROWS = 100_000  # of a table; below, it does not matter
_DEAD_SHARE = 0.5
_OLD_IDS = 500_000_000  # of 2 billion, at which the server stops
_DANGEROUS_IDS = 1_500_000_000


def check_lag(server: ServerState, _: int) -> Iterator[Finding]:
    """Find standbys that are far behind, and logs that are kept for nobody."""
    for standby in server.standbys:
        if standby.lag_seconds > _LAG_SECONDS or standby.lag_bytes > _LAG_BYTES:
            yield Finding(
                "standby-behind",
                "warning",
                f"The standby {standby.name} ({standby.state}) is {standby.lag_seconds:,.0f} s "
                f"and {standby.lag_bytes / 1e6:,.0f} MB of log behind.",
                "It takes long to take over, and keeps log files on the primary's disk.",
                "Look at its disk, its network and conflicts with its own queries.",
            )
    for name, kept in server.unused_slots:
        yield Finding(
            "unused-slot",
            "warning",
            f"Nobody reads the replication slot {name}, which keeps {kept / 1e6:,.0f} MB of log.",
            "The log grows until the disk is full, and the slot may keep deleted rows too.",
            f"Start the standby that it is for, or SELECT pg_drop_replication_slot('{name}').",
        )


def check_transactions(server: ServerState, _: int) -> Iterator[Finding]:
    """Find transactions that hold back whoever follows the log, or the removal of rows."""
    for each in server.transactions:
        is_idle = each.state.startswith("idle in transaction")
        if each.seconds < (_IDLE_SECONDS if is_idle else _LONG_SECONDS):
            continue
        yield Finding(
            "idle-transaction" if is_idle else "long-transaction",
            "warning",
            f"A transaction of {_session(each)} is open for {each.seconds:,.0f} s"
            + (", and its session does nothing." if is_idle else "."),
            "It has written: ready questions and trainings do not see events since then."
            if each.writes
            else "Rows that were deleted or replaced since cannot be removed, and tables grow.",
            f"End it, or SELECT pg_terminate_backend({each.pid}); set "
            "idle_in_transaction_session_timeout for roles that forget theirs.",
        )
    for name, seconds in server.prepared:
        if seconds > _IDLE_SECONDS:
            yield Finding(
                "prepared-transaction",
                "warning",
                f"The prepared transaction {name} is open for {seconds:,.0f} s.",
                "Ready questions and trainings do not see events since then.",
                f"COMMIT PREPARED '{name}' or ROLLBACK PREPARED '{name}'.",
            )


def check_connections(server: ServerState, workers: int) -> Iterator[Finding]:
    """Find a limit of connections that the pools of the replicas can reach.

    Args:
        server: the server.
        workers: of a service on this machine, and on each other by assumption.
    """
    limit = int(server.settings["max_connections"])
    limit -= int(server.settings["superuser_reserved_connections"])
    machines = max(1, server.machines)
    need = machines * workers * (POOL_SIZE + MAX_SNAPSHOTS + _OTHERS)
    if need > limit or server.connections > _FULL * limit:
        yield Finding(
            "few-connections",
            "warning",
            f"{machines} machines with {workers} workers may open {need:,} connections, "
            f"{server.connections:,} are open, and the server allows {limit:,}.",
            "Beyond the limit, questions are degraded and writes are refused with 429.",
            "Raise max_connections, which takes a restart of the server, or put a pooler in front "
            "(PgBouncer in session mode).",
        )


def check_vacuum(server: ServerState, _: int) -> Iterator[Finding]:
    """Find dead rows that nobody removes, and ids of transactions that run out."""
    if "off" in (server.settings["autovacuum"], server.settings["track_counts"]):
        yield Finding(
            "no-autovacuum",
            "warning",
            "autovacuum, or track_counts, is off.",
            "Deleted rows, those of forgotten users among them, stay in the tables, plans get "
            "worse, and the server stops when its transaction ids run out.",
            "ALTER SYSTEM SET autovacuum = on; ALTER SYSTEM SET track_counts = on; SELECT "
            "pg_reload_conf().",
        )
    dead = [
        each
        for each in server.tables
        if each.dead > _DEAD_ROWS and each.dead > _DEAD_SHARE * (each.live + each.dead)
    ]
    if dead:
        worst = max(dead, key=lambda each: each.dead)
        yield Finding(
            "dead-rows",
            "warning",
            f"More than half of the rows are dead in {len(dead)} tables; heed.{worst.name} has "
            f"{worst.dead:,} dead and {worst.live:,} live ones.",
            "Reads go over them, and the bytes of forgotten users stay.",
            f"VACUUM (ANALYZE) heed.{worst.name}; look for long transactions, and let autovacuum "
            "do more (autovacuum_vacuum_cost_limit).",
        )
    if server.transaction_age > _OLD_IDS:
        yield Finding(
            "old-transaction-ids",
            "error" if server.transaction_age > _DANGEROUS_IDS else "warning",
            f"The oldest transaction id that is not frozen is {server.transaction_age:,} ids old.",
            "At 2 billion the server takes no writes any more.",
            "End old transactions and unused slots, then VACUUM (FREEZE) the database.",
        )


def _session(each: OpenTransaction) -> str:
    application = f" by {each.application}" if each.application else ""
    return f"process {each.pid} ({each.user or 'another user'}{application})"


LOAD_CHECKS = (check_lag, check_transactions, check_connections, check_vacuum)
