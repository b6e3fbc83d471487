"""Checks of a PostgreSQL server: what it promises, who reads it, and what it is busy with.

A check sees the state of the server (`a`) and the number of workers of a service (`b`).
"""

from __future__ import annotations

from collections.abc import Callable

from service.domain.settings import is_loopback
from service.maintenance.doctor.findings import Checks
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


def _transactions(
    *, is_idle: bool, writes: bool
) -> Callable[[ServerState, int], list[OpenTransaction]]:
    """Return the condition that lists transactions that are open for too long."""
    seconds = _IDLE_SECONDS if is_idle else _LONG_SECONDS
    return lambda server, _: [
        transaction._replace(
            user=transaction.user or "another user",
            application=transaction.application and f" by {transaction.application}",
        )
        for transaction in server.transactions
        if transaction.state.startswith("idle in transaction") == is_idle
        and transaction.seconds >= seconds
        and transaction.writes == writes
    ]


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


SERVER_CHECKS: Checks[ServerState, int] = {
    "old-server": lambda server, _: server.version < OLDEST_SERVER and server.version // 10_000,
    "no-store": lambda server, _: not server.schema,
    "newer-schema": lambda server, _: server.schema > server.known_schema,
    "older-schema": lambda server, _: 0 < server.schema < server.known_schema,
    "unfinished-restore": lambda server, _: server.unfinished_restore,
    "no-fsync": _setting("fsync", "off"),
    "torn-pages": _setting("full_page_writes", "off"),
    "asynchronous-commit": _setting("synchronous_commit", "off"),
    "no-checksums": _setting("data_checksums", "off"),
    "damaged-pages": lambda server, _: server.checksum_failures or None,
    "asynchronous-standbys": lambda server, _: (
        None if _awaited(server) else (server.sees_statistics and len(server.standbys)) or None
    ),
    "one-disk": lambda server, _: (
        not _awaited(server) and not (server.standbys and server.sees_statistics)
    ),
    "unconfirmed-standby": _is_unconfirmed,
    "missing-standby": _is_missing_standby,
    "no-tls": _is_open,
    "superuser": lambda server, _: server.is_superuser,
    "unseen-statistics": lambda server, _: not server.sees_statistics,
    "clocks-differ": _clock_difference,
    "standby-behind": _late,
    "unused-slot": lambda server, _: list(server.unused_slots),
    "idle-transaction/writing": _transactions(is_idle=True, writes=True),
    "idle-transaction/reading": _transactions(is_idle=True, writes=False),
    "long-transaction/writing": _transactions(is_idle=False, writes=True),
    "long-transaction/reading": _transactions(is_idle=False, writes=False),
    "prepared-transaction": lambda server, _: [
        each for each in server.prepared if each[1] > _IDLE_SECONDS
    ],
    "few-connections": _connections,
    "no-autovacuum": lambda server, _: (
        "off" in (server.settings["autovacuum"], server.settings["track_counts"])
    ),
    "dead-rows": _dead_rows,
    "old-transaction-ids": lambda server, _: server.transaction_age > _DANGEROUS_IDS,
    "old-transaction-ids/warning": lambda server, _: (
        _OLD_IDS < server.transaction_age <= _DANGEROUS_IDS
    ),
}
