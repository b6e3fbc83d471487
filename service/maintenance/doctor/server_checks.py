"""Checks of a PostgreSQL server: what it promises, who reads it, and what it is busy with.

A check sees the state of the server (`a`) and the number of workers of a service (`b`).
"""

from __future__ import annotations

from collections.abc import Callable

from service.domain.settings import is_loopback
from service.maintenance.doctor.findings import Check, Severity
from service.stores.postgres.connections import MAX_SNAPSHOTS, POOL_SIZE
from service.stores.postgres.server_state import OpenTransaction, ServerState, Standby, TableState

OLDEST_SERVER = 130_000  # that has all functions that Heed calls
_CLOCK_SECONDS = 2.0
_CONFIRMS = {"sync", "quorum"}  # states of a standby that commits wait for
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

ServerCheck = Check[ServerState, int]


def _setting(name: str, value: str) -> Callable[[ServerState, int], bool]:
    return lambda server, _: server.settings[name] == value


def _is_open(server: ServerState, _: int) -> bool:
    is_local = not server.host or server.host.startswith("/") or is_loopback(server.host)
    return not is_local and not server.has_tls


def _awaited(server: ServerState) -> str:
    """Return the standbys that commits wait for."""
    return server.settings["synchronous_standby_names"]


def _late(server: ServerState, _: int) -> list[Standby]:
    return [
        standby
        for standby in server.standbys
        if standby.lag_seconds > _LAG_SECONDS or standby.lag_bytes > _LAG_BYTES
    ]


def _is_unconfirmed(server: ServerState, _: int) -> bool:
    is_weak = server.settings["synchronous_commit"] in {"local", "remote_write"}
    return bool(_awaited(server)) and is_weak


def _is_missing_standby(server: ServerState, workers: int) -> bool:
    if not _awaited(server) or _is_unconfirmed(server, workers) or not server.sees_statistics:
        return False
    return not any(standby.sync_state in _CONFIRMS for standby in server.standbys)


def _open_transactions(
    server: ServerState, *, is_idle: bool, seconds: float, writes: bool
) -> list[OpenTransaction]:
    return [
        transaction._replace(
            user=transaction.user or "another user",
            application=transaction.application and f" by {transaction.application}",
        )
        for transaction in server.transactions
        if transaction.state.startswith("idle in transaction") == is_idle
        and transaction.seconds >= seconds
        and transaction.writes == writes
    ]


def _transaction_check(*, is_idle: bool, writes: bool) -> ServerCheck:
    return Check(
        "idle-transaction" if is_idle else "long-transaction",
        "warning",
        "A transaction of process {it.pid} ({it.user}{it.application}) is open for "
        "{it.seconds:,.0f} s" + (", and its session does nothing." if is_idle else "."),
        "It has written: ready questions and trainings do not see events since then."
        if writes
        else "Rows that were deleted or replaced since cannot be removed, and tables grow.",
        "End it, or SELECT pg_terminate_backend({it.pid}); set "
        "idle_in_transaction_session_timeout for roles that forget theirs.",
        lambda server, _: _open_transactions(
            server,
            is_idle=is_idle,
            seconds=_IDLE_SECONDS if is_idle else _LONG_SECONDS,
            writes=writes,
        ),
    )


def _check_ids(severity: Severity, above: int, up_to: int) -> ServerCheck:
    return Check(
        "old-transaction-ids",
        severity,
        "The oldest transaction id that is not frozen is {a.transaction_age:,} ids old.",
        "At 2 billion the server takes no writes any more.",
        "End old transactions and unused slots, then VACUUM (FREEZE) the database.",
        lambda server, _: above < server.transaction_age <= up_to,
    )


def _connections(server: ServerState, workers: int) -> tuple[int, int, int] | None:
    """Return machines, connections that they may open, and the limit, if the limit is too low."""
    limit = int(server.settings["max_connections"])
    limit -= int(server.settings["superuser_reserved_connections"])
    machines = max(1, server.machines)
    need = machines * workers * (POOL_SIZE + MAX_SNAPSHOTS + _OTHERS)
    is_low = need > limit or server.connections > _FULL * limit
    return (machines, need, limit) if is_low else None


def _dead_rows(server: ServerState, _: int) -> tuple[int, TableState] | None:
    dead = [
        table
        for table in server.tables
        if table.dead > _DEAD_ROWS and table.dead > _DEAD_SHARE * (table.live + table.dead)
    ]
    return (len(dead), max(dead, key=lambda table: table.dead)) if dead else None


def _clock_difference(server: ServerState, _: int) -> str | None:
    if abs(server.clock_ahead) <= _CLOCK_SECONDS:
        return None
    return f"{abs(server.clock_ahead):,.0f} s {'ahead of' if server.clock_ahead > 0 else 'behind'}"


SERVER_CHECKS: tuple[ServerCheck, ...] = (
    Check(
        "old-server",
        "error",
        f"PostgreSQL {{it}} is older than Heed needs, which is {OLDEST_SERVER // 10_000}.",
        "It lacks functions by which changes are numbered.",
        "Upgrade the server (pg_upgrade), best to the newest version.",
        lambda server, _: server.version < OLDEST_SERVER and server.version // 10_000,
    ),
    Check(
        "no-store",
        "error",
        "There is nothing of Heed in the database {a.name}.",
        "A service that is started there is empty.",
        "Check HEED_STORE; restore a backup with heed restore, or start the service, which "
        "creates the schema.",
        lambda server, _: not server.schema,
    ),
    Check(
        "newer-schema",
        "error",
        "The database has version {a.schema} of Heed's schema; this Heed reads up to "
        "{a.known_schema}.",
        "The service does not start.",
        "Install the version of Heed that migrated it, or a newer one.",
        lambda server, _: server.schema > server.known_schema,
    ),
    Check(
        "older-schema",
        "warning",
        "The database has version {a.schema} of Heed's schema; this Heed writes {a.known_schema}.",
        "The next start migrates it.",
        "Back it up first, with the version of Heed that serves it, then start the service.",
        lambda server, _: 0 < server.schema < server.known_schema,
    ),
    Check(
        "unfinished-restore",
        "error",
        "The restore of the {it} was interrupted.",
        "The database holds a part of it, and no command will use it.",
        "Run heed restore with that backup again, which goes on; or create a new database.",
        lambda server, _: server.unfinished_restore,
    ),
    Check(
        "no-fsync",
        "error",
        "fsync is off.",
        "A loss of power loses acknowledged events, and can damage the whole database.",
        "ALTER SYSTEM SET fsync = on, and SELECT pg_reload_conf().",
        _setting("fsync", "off"),
    ),
    Check(
        "torn-pages",
        "error",
        "full_page_writes is off.",
        "A page that is half written when the power fails is not repaired.",
        "ALTER SYSTEM SET full_page_writes = on, and SELECT pg_reload_conf().",
        _setting("full_page_writes", "off"),
    ),
    Check(
        "asynchronous-commit",
        "error",
        "synchronous_commit is off.",
        "What is acknowledged is not on any disk yet: a crash of the server loses it.",
        "ALTER SYSTEM SET synchronous_commit = on (also ALTER ROLE … or ALTER DATABASE …, "
        "where it was set), and SELECT pg_reload_conf().",
        _setting("synchronous_commit", "off"),
    ),
    Check(
        "no-checksums",
        "warning",
        "The server's pages have no checksums.",
        "Damage by a disk is served, and backed up, instead of found.",
        "Stop the server and run pg_checksums --enable, or move to one that was made by "
        "initdb --data-checksums.",
        _setting("data_checksums", "off"),
    ),
    Check(
        "damaged-pages",
        "error",
        "PostgreSQL has read {it:,} damaged pages (pg_stat_database.checksum_failures).",
        "Rows on them cannot be read, or are lost.",
        "Look for the file in the server's log, run heed check --full and pg_amcheck, restore "
        "a backup, and replace the disk.",
        lambda server, _: server.checksum_failures or None,
    ),
    Check(
        "asynchronous-standbys",
        "warning",
        "No commit waits for a standby, and there are {it}.",
        "One that is promoted may lack events that were acknowledged.",
        "Set synchronous_standby_names, such as 'ANY 1 (*)', and reload.",
        lambda server, _: (
            None if _awaited(server) else (server.sees_statistics and len(server.standbys)) or None
        ),
    ),
    Check(
        "one-disk",
        "note",
        "An acknowledged event is on the disk of one server (synchronous_standby_names is empty).",
        "If that disk is lost, events since the last backup are lost.",
        "Add a standby, and set synchronous_standby_names = 'ANY 1 (*)'.",
        lambda server, _: not _awaited(server) and not (server.standbys and server.sees_statistics),
    ),
    Check(
        "unconfirmed-standby",
        "warning",
        "synchronous_commit is {a.settings[synchronous_commit]}, so that commits do not wait "
        "until a standby has them on its disk.",
        "A standby that is promoted may lack events that were acknowledged.",
        "ALTER SYSTEM SET synchronous_commit = on, and SELECT pg_reload_conf().",
        _is_unconfirmed,
    ),
    Check(
        "missing-standby",
        "error",
        "Commits wait for a standby ({a.settings[synchronous_standby_names]}), and none of "
        "these is connected.",
        "Writes are refused with 503 until one is.",
        "Start the standby, or take its name out of synchronous_standby_names and reload: then "
        "what is acknowledged is on one disk.",
        _is_missing_standby,
    ),
    Check(
        "no-tls",
        "warning",
        "The connection to {a.host} is not encrypted.",
        "Anyone on the network can read histories and digests of keys, and change them.",
        "Turn ssl on at the server, and put sslmode=verify-full and sslrootcert into HEED_STORE.",
        _is_open,
    ),
    Check(
        "superuser",
        "warning",
        "Heed connects as {a.user}, a superuser.",
        "An intruder in Heed would control the server, its files and all other databases.",
        "CREATE ROLE heed LOGIN, let it own the database and the schema heed, and name it in "
        "HEED_STORE.",
        lambda server, _: server.is_superuser,
    ),
    Check(
        "unseen-statistics",
        "note",
        "The role {a.user} does not see standbys and sessions of others.",
        "Replication and long transactions were not checked.",
        "GRANT pg_read_all_stats TO {a.user}, or run heed doctor with a URL of another role.",
        lambda server, _: not server.sees_statistics,
    ),
    Check(
        "clocks-differ",
        "warning",
        "The server's clock is {it} this machine's.",
        "Machines give new events times that contradict one another, and leases of trainings "
        "go by the server's.",
        "Keep both clocks by NTP (timedatectl).",
        _clock_difference,
    ),
    Check(
        "standby-behind",
        "warning",
        "The standby {it.name} ({it.state}) is {it.lag_seconds:,.0f} s and {it.lag_bytes:,} "
        "bytes of log behind.",
        "A failover to it takes long, and it keeps log files on the primary's disk.",
        "Look at its disk, its network and conflicts with its own queries.",
        _late,
    ),
    Check(
        "unused-slot",
        "warning",
        "Nobody reads the replication slot {it[0]}, which keeps {it[1]:,} bytes of log.",
        "The log grows until the disk is full, and the slot may keep deleted rows too.",
        "Start the standby that it is for, or SELECT pg_drop_replication_slot('{it[0]}').",
        lambda server, _: list(server.unused_slots),
    ),
    *(
        _transaction_check(is_idle=is_idle, writes=writes)
        for is_idle in (True, False)
        for writes in (True, False)
    ),
    Check(
        "prepared-transaction",
        "warning",
        "The prepared transaction {it[0]} is open for {it[1]:,.0f} s.",
        "Ready questions and trainings do not see events since then.",
        "COMMIT PREPARED '{it[0]}' or ROLLBACK PREPARED '{it[0]}'.",
        lambda server, _: [each for each in server.prepared if each[1] > _IDLE_SECONDS],
    ),
    Check(
        "few-connections",
        "warning",
        "{it[0]} machines with {b} workers may open {it[1]:,} connections, {a.connections:,} "
        "are open, and the server allows {it[2]:,}.",
        "Beyond the limit, questions are degraded and writes are refused with 429.",
        "Raise max_connections, which takes a restart of the server, or put a pooler in front "
        "(PgBouncer in session mode).",
        _connections,
    ),
    Check(
        "no-autovacuum",
        "warning",
        "autovacuum, or track_counts, is off.",
        "Deleted rows, those of forgotten users among them, stay in the tables, plans get "
        "worse, and the server stops when its transaction ids run out.",
        "ALTER SYSTEM SET autovacuum = on; ALTER SYSTEM SET track_counts = on; SELECT "
        "pg_reload_conf().",
        lambda server, _: "off" in (server.settings["autovacuum"], server.settings["track_counts"]),
    ),
    Check(
        "dead-rows",
        "warning",
        "More than half of the rows are dead in {it[0]} tables; heed.{it[1].name} has "
        "{it[1].dead:,} dead and {it[1].live:,} live ones.",
        "Reads go over them, and the bytes of forgotten users stay.",
        "VACUUM (ANALYZE) heed.{it[1].name}; look for long transactions, and let autovacuum "
        "do more (autovacuum_vacuum_cost_limit).",
        _dead_rows,
    ),
    _check_ids("error", _DANGEROUS_IDS, 1 << 32),
    _check_ids("warning", _OLD_IDS, _DANGEROUS_IDS),
)
