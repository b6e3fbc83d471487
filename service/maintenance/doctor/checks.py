"""Checks of the machine, of settings, and of each namespace: its files, its log and its model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import apsw

from models.data.interactions import DISLIKE, NEGATIVE
from service.domain.errors import Corrupt, HeedError, NotFound
from service.domain.settings import is_loopback, unknown_variables
from service.domain.timestamps import to_rfc3339
from service.jobs.job import Job
from service.maintenance.backups.manifest import read_backup_manifest
from service.maintenance.doctor.findings import FINDINGS, Checks, Finding
from service.maintenance.doctor.installation import DAY, Installation, LogSummary, NamespaceData
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
from service.stores.records import copying
from service.stores.sqlite.database_file import read_store_file
from service.stores.sqlite.dialect import run_job
from service.stores.sqlite.guard import check_mark
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.wal import check_wal

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

# --------------------------------------------------------------------------------- the host


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
