"""Checks of the machine, of settings, of each namespace, and of a PostgreSQL server.

A check is a condition and a finding of its name, whose sentences are in `findings.toml`.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import apsw

from models.data.interactions import DISLIKE, NEGATIVE
from service.domain.errors import Corrupt, HeedError, NotFound
from service.domain.settings import is_loopback, unknown_variables
from service.domain.timestamps import to_rfc3339
from service.jobs.job import Job
from service.maintenance.backup_manifest import read_backup_manifest
from service.maintenance.installation import DAY, Installation, LogSummary, NamespaceData
from service.runtime.data_layout import (
    CHECKPOINT_FILE,
    EMBEDDINGS_FILE,
    JOBS_FOLDER,
    LAST_BACKUP_FILE,
    MODELS_FOLDER,
    STORE_FILE,
    UNFINISHED_RESTORE,
)
from service.runtime.durable_files import try_lock
from service.snapshots.text_embeddings import is_of_other_encoder
from service.snapshots.version_files import read_files, read_manifest
from service.stores.postgres.connections import MAX_SNAPSHOTS, POOL_SIZE
from service.stores.postgres.server_state import OpenTransaction, ServerState, Standby, TableState
from service.stores.records import copying
from service.stores.sqlite.database_file import read_store_file
from service.stores.sqlite.guard import check_mark
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.transaction import run_job
from service.stores.sqlite.wal import check_wal

# An error: answers or data are at risk now. A warning: something is likely not as intended.
# A note: nothing is wrong.
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

A = TypeVar("A")
B = TypeVar("B")


class Finding(NamedTuple):
    """One fault, in sentences for the operator."""

    code: str  # stable, such as `unknown-items`
    severity: Severity
    what: str
    why: str  # it matters
    todo: str
    namespace: str | None = None  # None: the whole installation

    def about(self, it: object, **facts: object) -> Finding:
        """Return the finding with `{it}` and other facts filled into its sentences."""
        what, why, todo = (text.format(it=it, **facts) for text in self[2:5])
        return self._replace(what=what, why=why, todo=todo)


# Conditions by the name of a finding: each takes two facts, and returns a list with an entry for
# each finding, or one value; False and None are no fault. The entry is `{it}` in the sentences.
Checks = Mapping[str, Callable[[A, B], object]]


FINDINGS: Mapping[str, Finding] = {
    name: Finding(name.partition("/")[0], **row)
    for name, row in tomllib.loads(
        Path(__file__).with_name("findings.toml").read_text("utf-8")
    ).items()
}


def run_checks(checks: Checks[A, B], a: A, b: B) -> Iterator[Finding]:
    """Yield the findings of checks on two facts, which their sentences call `{a}` and `{b}`."""
    for name, condition in checks.items():
        result = condition(a, b)
        if result is None or result is False:
            continue
        for it in result if isinstance(result, list) else [result]:
            yield FINDINGS[name].about(it, a=a, b=b)


# --------------------------------------------------------------------------------- the host

MAX_FULL_CHECK_BYTES = 256 << 20  # of a store whose pages are checked without `full`, ~1 s

_LEAST_FREE = 0.05  # of the disk
_HIT_RATE = 0.5
_REQUESTS = 1_000  # below which a hit rate says nothing
_EVENT_BYTES = 64  # of a cached history, for each event; without derived state
_FEW = 100  # events; of fewer, shares say nothing
_SKEWED = 0.5  # share of the largest user
_ALIKE = 0.9  # share of the largest item
_HEAVY = 1_000  # times the mean weight
_RATINGS = 10  # largest value of a usual scale of ratings
_OLD_DAYS = 30  # between a model and the newest event
_GROWTH = 2.0  # times the events that a model was trained on


def _open_address(installation: Installation, *, insecure: bool) -> str | None:
    settings = installation.settings
    if is_loopback(settings.host) or settings.insecure != insecure:
        return None
    return settings.host or "every address"


def _full_disk(
    installation: Installation, namespaces: list[NamespaceData]
) -> tuple[float, float, float] | None:
    total, free = installation.disk
    paths = [namespace.data / STORE_FILE for namespace in namespaces]
    stores = sum(path.stat().st_size for path in paths if path.exists())
    is_full = free < max(_LEAST_FREE * total, stores)
    return (free / 1e9, total / 1e9, stores / 1e9) if is_full else None


def _clock_behind(
    installation: Installation, namespaces: list[NamespaceData]
) -> tuple[str, str] | None:
    created = [each.model.manifest.created for each in namespaces if each.model is not None]
    if not created or installation.now >= max(created):
        return None
    return to_rfc3339(installation.now), to_rfc3339(max(created))


def _cache_misses(installation: Installation, _: list[NamespaceData]) -> tuple[float, float] | None:
    metrics = installation.metrics or {}
    hits = metrics.get('heed_cache_hits_total{cache="history"}', 0)
    requests = hits + metrics.get('heed_cache_misses_total{cache="history"}', 0)
    is_low = requests >= _REQUESTS and hits < _HIT_RATE * requests
    return (requests, hits / requests) if is_low else None


def _small_cache(
    installation: Installation, namespaces: list[NamespaceData]
) -> tuple[float, float] | None:
    if installation.metrics is not None:
        return None  # the hit rate says more
    budget = installation.settings.history_cache_bytes
    need = _EVENT_BYTES * sum(each.log.events for each in namespaces if each.log is not None)
    return (need / 1e6, budget / 1e6) if need > budget else None


HOST_CHECKS: Checks[Installation, list[NamespaceData]] = {
    "unknown-variable": lambda installation, _: list(unknown_variables(installation.environment)),
    "open-address": lambda installation, _: _open_address(installation, insecure=False),
    "open-address/warning": lambda installation, _: _open_address(installation, insecure=True),
    "any-host": lambda installation, _: "*" in installation.settings.allowed_hosts.split(","),
    "disk-nearly-full": _full_disk,
    "clock-behind": _clock_behind,
    "cache-misses": _cache_misses,
    "cache-small": _small_cache,
}


def check_backup(installation: Installation, namespaces: list[NamespaceData]) -> Iterator[Finding]:
    """Find an installation whose last backup is old, missing, or was never made."""
    if not any(each.log is not None and each.log.events for each in namespaces):
        return
    todo = "Run heed backup TARGET regularly, and keep a copy on another machine."
    server = installation.server
    if server is not None:
        archived = server.archived_ago
        if archived is not None and archived < installation.backup_days * DAY / 1e6:
            return  # the server's own base backups and log, which this machine does not see
        todo += " Or keep base backups and an archive of the log (pg_basebackup, archive_mode)."
    try:
        last = json.loads((installation.settings.data / LAST_BACKUP_FILE).read_bytes())
        target, created = Path(last["target"]), int(last["created"])
    except (OSError, ValueError, KeyError, TypeError):
        here = "" if server is None else " on this machine, and the server archives no log"
        yield FINDINGS["no-backup"].about(here, todo=todo)
        return
    days = (installation.now - created) / DAY
    if days > installation.backup_days:
        yield FINDINGS["old-backup"].about(to_rfc3339(created), days=days, todo=todo)
    try:
        read_backup_manifest(target)
    except (HeedError, OSError) as error:
        yield FINDINGS["missing-backup"].about(error)


# ---------------------------------------------------------------------------- stored files


def check_store_file(data: Path, *, full: bool) -> Iterator[Finding]:
    """Find damage of the store in a directory, and a schema of another version.

    The pages of a store of more than 256 MiB are checked only with `full`.
    """
    path = data / STORE_FILE
    try:
        with read_store_file(path) as store:
            if store.schema != SCHEMA_VERSION:
                finding = FINDINGS[
                    f"{'newer' if store.schema > SCHEMA_VERSION else 'older'}-schema/file"
                ]
                yield finding.about(path, schema=store.schema, known=SCHEMA_VERSION)
            if (origin := run_job(store.connection, copying.unfinished())) is not None:
                yield FINDINGS["unfinished-copy"].about(f"{path} of {origin}")
            if full or path.stat().st_size <= MAX_FULL_CHECK_BYTES:
                problem = store.connection.execute("PRAGMA quick_check(1)").get
                if problem != "ok":
                    raise Corrupt(f"{path} is damaged: {problem}")
            else:
                yield FINDINGS["unchecked-pages"].about(path)
            _check_log(store.connection, Path(f"{path}-wal"))
            check_mark(path, store.connection.execute("SELECT clock FROM state").get)
    except NotFound:
        yield FINDINGS["no-store/file"].about(path)
    except HeedError as error:
        yield FINDINGS["damaged-store"].about(error)


def _check_log(connection: apsw.Connection, log: Path) -> None:
    """Raise `Corrupt` if the log is damaged; it is not read while another process writes."""
    if not log.exists() or not log.stat().st_size:
        return
    connection.pragma("query_only", False)
    try:
        connection.execute("BEGIN IMMEDIATE")  # the log stands still; nothing is written
    except apsw.BusyError:
        return
    try:
        check_wal(log)
    finally:
        connection.execute("ROLLBACK")


def check_model_files(data: Path) -> Iterator[Finding]:
    """Find versions of models whose files are not what was published."""
    folder = data / MODELS_FOLDER / "versions"
    for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            for _name, _content in read_files(directory, read_manifest(directory)):
                pass
        except (HeedError, OSError) as error:
            yield FINDINGS["damaged-model"].about(error)


def _is_training(data: Path) -> bool:
    path = data / JOBS_FOLDER / "child.lock"
    if not path.exists():
        return False
    lock = try_lock(path)
    if lock is None:
        return True
    os.close(lock)
    return False


def _interrupted_jobs(_: Installation, namespace: NamespaceData) -> list[str]:
    if _is_training(namespace.data):
        return []
    unfinished = []
    for path in sorted((namespace.data / JOBS_FOLDER).glob("*.json")):
        try:
            state = Job.from_json(path.read_bytes()).state
        except (ValueError, OSError):
            continue
        if state in {"queued", "running"}:
            unfinished.append(path.stem)
    return unfinished


def _modes(namespace: NamespaceData) -> tuple[int, int]:
    """Return the modes of the directory and of the store; 0 if this machine has none."""
    path = namespace.data / STORE_FILE
    mode = namespace.data.stat().st_mode if namespace.data.exists() else 0
    return mode, path.stat().st_mode if path.exists() else 0


def _is_writable(namespace: NamespaceData) -> bool:
    mode, file_mode = _modes(namespace)
    return bool((mode | file_mode) & 0o022)


def _is_readable(_: Installation, namespace: NamespaceData) -> bool:
    mode, file_mode = _modes(namespace)
    return bool(mode & 0o001 and file_mode & 0o004) and not _is_writable(namespace)


def _other_embeddings(installation: Installation, namespace: NamespaceData) -> Path | None:
    path, encoder = namespace.data / EMBEDDINGS_FILE, installation.encoder
    is_other = encoder is not None and path.exists() and is_of_other_encoder(path, encoder)
    return path if is_other else None


def _missing_embeddings(installation: Installation, namespace: NamespaceData) -> Path | None:
    path, log = namespace.data / EMBEDDINGS_FILE, namespace.log
    has_items = log is not None and log.items and namespace.model is not None
    is_here = installation.encoder is not None and installation.server is None
    return path if has_items and is_here and not path.exists() else None


NAMESPACE_CHECKS: Checks[Installation, NamespaceData] = {
    "unfinished-restore/directory": lambda _, namespace: (
        namespace.data / UNFINISHED_RESTORE
    ).exists(),
    "unfinished-training": lambda _, namespace: (
        (namespace.data / CHECKPOINT_FILE).exists()
        and not _is_training(namespace.data)
        and namespace.data / CHECKPOINT_FILE
    ),
    "interrupted-job": _interrupted_jobs,
    "writable-by-others": lambda _, namespace: _is_writable(namespace),
    "readable-by-others": _is_readable,
    "other-encoder": lambda installation, namespace: (
        namespace.model is not None
        and installation.encoder not in (None, namespace.model.text_encoder)
    ),
    "other-embeddings": _other_embeddings,
    "missing-embeddings": _missing_embeddings,
}

# ------------------------------------------------------------------------------ event logs


def _unknown_items(log: LogSummary, *, many: bool) -> tuple[int, float] | None:
    count = log.unknown_item_events
    is_many = count > 0.01 * log.events
    return (count, count / log.events) if count and is_many == many else None


def _only_negative(log: LogSummary, _: NamespaceData) -> str | None:
    types = set(log.events_by_type)
    return " or ".join(sorted(types)) if types and types <= NEGATIVE else None


def _untrained_types(log: LogSummary, namespace: NamespaceData) -> tuple[str, int] | None:
    if namespace.model is None:
        return None
    unknown = sorted(set(log.events_by_type) - {*namespace.model.event_types, *NEGATIVE})
    count = sum(log.events_by_type[name] for name in unknown)
    return (", ".join(unknown), count) if unknown else None


def _rating_weights(log: LogSummary, _: NamespaceData) -> str | None:
    are_ratings = (
        log.events >= _FEW
        and len(log.weights) >= 4
        and all(2 * weight == int(2 * weight) for weight in log.weights)
        and log.weights[-1] <= _RATINGS
        and DISLIKE not in log.events_by_type
    )
    return ", ".join(f"{weight:g}" for weight in log.weights) if are_ratings else None


def _old_model(log: LogSummary, namespace: NamespaceData) -> tuple[str, int, str] | None:
    if namespace.model is None or not log.events:
        return None
    manifest = namespace.model.manifest
    days, trained = (log.newest - manifest.created) / DAY, int(manifest.metadata.get("events", 0))
    if days <= _OLD_DAYS and (not trained or log.events <= _GROWTH * trained):
        return None
    return to_rfc3339(manifest.created), trained, to_rfc3339(log.newest)


LOG_CHECKS: Checks[LogSummary, NamespaceData] = {
    "wrong-counts": lambda log, _: log.events != log.stated_events,
    "unknown-items": lambda log, _: _unknown_items(log, many=True),
    "unknown-items/note": lambda log, _: _unknown_items(log, many=False),
    "only-dislikes": _only_negative,
    "untrained-types": _untrained_types,
    "one-user": lambda log, _: log.events >= _FEW and log.largest_user > _SKEWED * log.events,
    "one-item": lambda log, _: log.events >= _FEW and log.largest_item > _ALIKE * log.events,
    "equal-times": lambda log, _: (
        log.events >= _FEW and log.oldest == log.newest and to_rfc3339(log.newest)
    ),
    "future-events": lambda log, _: bool(log.future_events) and to_rfc3339(log.newest),
    "heavy-weights": lambda log, _: (
        log.events >= _FEW and log.largest_weight > _HEAVY * log.mean_weight
    ),
    "ratings-as-weights": _rating_weights,
    "old-model": _old_model,
}

# --------------------------------------------------------------- the server of a database

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
