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
from service.maintenance.doctor.findings import Check, Finding
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
from service.snapshots.versions.manifest import read_files, read_manifest
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

_NO_BACKUP = "A broken disk, or a mistake, would lose what came since."


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


HOST_CHECKS: tuple[Check[Installation, list[NamespaceData]], ...] = (
    Check(
        "unknown-variable",
        "warning",
        "{it}.",
        "It has no effect: the default applies.",
        "Correct the name; docs/reference/settings.md lists all settings.",
        lambda installation, _: list(unknown_variables(installation.environment)),
    ),
    Check(
        "open-address",
        "error",
        "HEED_HOST is {it}.",
        "The service refuses to start.",
        "Bind 127.0.0.1 behind a proxy that authenticates, or guard the network.",
        lambda installation, _: _open_address(installation, insecure=False),
    ),
    Check(
        "open-address",
        "warning",
        "HEED_HOST is {it}, and HEED_INSECURE allows it.",
        "Other machines can read and write everything, unless something else guards it.",
        "Bind 127.0.0.1 behind a proxy that authenticates, or guard the network.",
        lambda installation, _: _open_address(installation, insecure=True),
    ),
    Check(
        "any-host",
        "warning",
        "HEED_ALLOWED_HOSTS allows every name.",
        "Pages of other sites can read and write by DNS rebinding.",
        "Name the hosts by which clients reach the service.",
        lambda installation, _: "*" in installation.settings.allowed_hosts.split(","),
    ),
    Check(
        "disk-nearly-full",
        "warning",
        "The disk of {a.settings.data} has {it[0]:.1f} GB free of {it[1]:.1f}; the stores have "
        "{it[2]:.1f}.",
        "Writes are refused when it is full, and a migration needs room for a copy.",
        "Free space, prune models (heed models prune), or move the data to a larger disk.",
        _full_disk,
    ),
    Check(
        "clock-behind",
        "error",
        "The clock shows {it[0]}, but a model was published at {it[1]}.",
        "New events get wrong times, and existing ones do not count yet.",
        "Set the clock (timedatectl) and keep it by NTP.",
        _clock_behind,
    ),
    Check(
        "cache-misses",
        "warning",
        "The cache had {it[1]:.0%} of {it[0]:,.0f} histories.",
        "The others are read from the store and encoded again, which takes longer.",
        "Raise HEED_HISTORY_CACHE_BYTES, now {a.settings.history_cache_bytes:,}.",
        _cache_misses,
    ),
    Check(
        "cache-small",
        "warning",
        "The histories take about {it[0]:,.0f} MB in memory, and the cache has {it[1]:,.0f} MB.",
        "If most users are active, histories are read from the store again and again.",
        "Raise HEED_HISTORY_CACHE_BYTES, or run heed doctor while the service runs to see the "
        "hit rate.",
        _small_cache,
    ),
)


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
        what = f"heed backup was never run{here}."
        yield Finding("no-backup", "warning", what, _NO_BACKUP, todo)
        return
    days = (installation.now - created) / DAY
    if days > installation.backup_days:
        what = f"The last backup is of {to_rfc3339(created)}, {days:.0f} days ago."
        yield Finding("old-backup", "warning", what, _NO_BACKUP, todo)
    try:
        read_backup_manifest(target)
    except (HeedError, OSError) as error:
        what = f"The last backup cannot be read here: {error}."
        yield Finding("missing-backup", "note", what, _NO_BACKUP, "Check where it is kept now.")


# ---------------------------------------------------------------------------- stored files

INTERRUPTED_JOB = Finding(
    "interrupted-job",
    "warning",
    "The training {it} is recorded as unfinished, and no process runs it.",
    "It was killed; clients that wait for it wait in vain until the next start.",
    "Start the service, which marks it as failed, and train again.",
)
UNFINISHED_COPY = Finding(
    "unfinished-copy",
    "error",
    "The copy to {it} has not finished.",
    "Users and events may be missing, and no command will use the store.",
    "Run the same heed copy --from SOURCE --to TARGET again, which goes on where it stopped.",
)
DAMAGED_MODEL = Finding(
    "damaged-model",
    "error",
    "A model version is damaged: {it}.",
    "It cannot be served; if it is the one in use, the service does not start.",
    "Activate another version (heed models list, heed models activate), train again, or restore a "
    "backup. Damage comes from the disk: check it.",
)
_DAMAGED_STORE = Finding(
    "damaged-store",
    "error",
    "{it}.",
    "Events may be lost, and the service may not start.",
    "Stop the service, keep a copy of the directory, and restore a backup (heed restore) into "
    "another one. Check the disk.",
)
_NO_STORE = Finding(
    "no-store",
    "error",
    "There is no store at {it}.",
    "A service that is started there is empty.",
    "Check HEED_DATA or --data; restore a backup with heed restore.",
)
_UNCHECKED_PAGES = Finding(
    "unchecked-pages",
    "note",
    "The pages of {it} were not checked: it is large.",
    "Damage is found when a page is read, not before.",
    "Run heed doctor --full when there is time.",
)
_NEWER_SCHEMA = Finding(
    "newer-schema",
    "error",
    "{it} has schema version {schema}; this Heed reads up to {known}.",
    "The service does not start.",
    "Install the version of Heed that wrote it, or a newer one.",
)
_OLDER_SCHEMA = Finding(
    "older-schema",
    "warning",
    "{it} has schema version {schema}; this Heed writes {known}.",
    "The next start migrates it.",
    "Back it up first (heed backup), then start the service.",
)


def check_store_file(data: Path, *, full: bool) -> Iterator[Finding]:
    """Find damage of the store in a directory, and a schema of another version.

    The pages of a store of more than 256 MiB are checked only with `full`.
    """
    path = data / STORE_FILE
    try:
        with read_store_file(path) as store:
            if store.schema != SCHEMA_VERSION:
                finding = _NEWER_SCHEMA if store.schema > SCHEMA_VERSION else _OLDER_SCHEMA
                yield finding.about(path, schema=store.schema, known=SCHEMA_VERSION)
            if (origin := run_job(store.connection, copying.unfinished())) is not None:
                yield UNFINISHED_COPY.about(f"{path} of {origin}")
            if full or path.stat().st_size <= MAX_FULL_CHECK_BYTES:
                problem = store.connection.execute("PRAGMA quick_check(1)").get
                if problem != "ok":
                    raise Corrupt(f"{path} is damaged: {problem}")
            else:
                yield _UNCHECKED_PAGES.about(path)
            _check_log(store.connection, Path(f"{path}-wal"))
            check_mark(path, store.connection.execute("SELECT clock FROM state").get)
    except NotFound:
        yield _NO_STORE.about(path)
    except HeedError as error:
        yield _DAMAGED_STORE.about(error)


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
            yield DAMAGED_MODEL.about(error)


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


NAMESPACE_CHECKS: tuple[Check[Installation, NamespaceData], ...] = (
    Check(
        "unfinished-restore",
        "error",
        "A restore into {b.data} was interrupted.",
        "The directory holds part of a backup, and no command will use it.",
        "Empty the directory and run heed restore again.",
        lambda _, namespace: (namespace.data / UNFINISHED_RESTORE).exists(),
    ),
    Check(
        "unfinished-training",
        "warning",
        "A training has not finished: {it} holds its state.",
        "Its model was never published.",
        "Train again, which resumes it if the events are the same, or delete the file.",
        lambda _, namespace: (
            (namespace.data / CHECKPOINT_FILE).exists()
            and not _is_training(namespace.data)
            and namespace.data / CHECKPOINT_FILE
        ),
    ),
    INTERRUPTED_JOB.when(_interrupted_jobs),
    Check(
        "writable-by-others",
        "warning",
        "Other accounts of this machine may write to {b.data} or its store.",
        "They can change or replace histories and models.",
        "chmod -R go-w {b.data}",
        lambda _, namespace: _is_writable(namespace),
    ),
    Check(
        "readable-by-others",
        "note",
        f"Every account of this machine may read {{b.data}}/{STORE_FILE}.",
        "It holds histories of people.",
        "chmod 700 {b.data}, unless only Heed's account exists.",
        _is_readable,
    ),
    Check(
        "other-encoder",
        "error",
        "The model in use was trained with the text encoder {b.model.text_encoder}, and "
        "HEED_ENCODER selects {a.encoder}.",
        "The model cannot be served: vectors of different encoders do not compare.",
        "Set HEED_ENCODER as it was at the training, or train again.",
        lambda installation, namespace: (
            namespace.model is not None
            and installation.encoder not in (None, namespace.model.text_encoder)
        ),
    ),
    Check(
        "other-embeddings",
        "warning",
        "{it} holds vectors of another text encoder than {a.encoder}.",
        "All texts are encoded again at the next start, which can take long.",
        "Set HEED_ENCODER as it was, or start the service once when there is time.",
        _other_embeddings,
    ),
    Check(
        "missing-embeddings",
        "warning",
        "{it} is missing, and the catalogue has {b.log.items:,} items.",
        "All texts are encoded at the next start, which can take long.",
        "Start the service once when there is time; check that the directory is writable.",
        _missing_embeddings,
    ),
)

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


_UNKNOWN_ITEMS = Finding(
    "unknown-items",
    "warning",
    "{it[0]:,} of {a.events:,} events ({it[1]:.0%}) are of items that are not in the catalogue.",
    "These items are never recommended, and have no text that a model could use.",
    "Import the items with heed import items, or check that both exports spell item_id alike.",
)

LOG_CHECKS: tuple[Check[LogSummary, NamespaceData], ...] = (
    Check(
        "wrong-counts",
        "error",
        "The store counts {a.stated_events:,} events and has {a.events:,}.",
        "Something else than Heed has written to the store.",
        "Restore a backup, or export and import into a new directory.",
        lambda log, _: log.events != log.stated_events,
    ),
    _UNKNOWN_ITEMS.when(lambda log, _: _unknown_items(log, many=True)),
    _UNKNOWN_ITEMS._replace(severity="note").when(lambda log, _: _unknown_items(log, many=False)),
    Check(
        "only-dislikes",
        "warning",
        "All {a.events:,} events are of type {it}.",
        "Nothing says what anybody likes, so that no model can be trained.",
        "Check type and --dislikes-below of the import; heed import --undo ID takes it back.",
        _only_negative,
    ),
    Check(
        "untrained-types",
        "warning",
        "The model in use was not trained on events of type {it[0]} ({it[1]:,} events).",
        "It does not know what they mean.",
        "Train again (heed train), or check the spelling of the type in what sends events.",
        _untrained_types,
    ),
    Check(
        "one-user",
        "warning",
        "One user has {a.largest_user:,} of {a.events:,} events.",
        "A shared id (a guest, a crawler, an empty cell) drowns what people do.",
        "Send an id of each visitor, or leave these events out of the import.",
        lambda log, _: log.events >= _FEW and log.largest_user > _SKEWED * log.events,
    ),
    Check(
        "one-item",
        "warning",
        "One item has {a.largest_item:,} of {a.events:,} events.",
        "Users who all did the same cannot be told apart.",
        "Check that item_id is mapped to the item's own column.",
        lambda log, _: log.events >= _FEW and log.largest_item > _ALIKE * log.events,
    ),
    Check(
        "equal-times",
        "warning",
        "All {a.events:,} events have the time {it}.",
        "Without times, the order of events means nothing: no trends, no evaluation by time.",
        "Map timestamp to a column of the export and import it again.",
        lambda log, _: log.events >= _FEW and log.oldest == log.newest and to_rfc3339(log.newest),
    ),
    Check(
        "future-events",
        "warning",
        "{a.future_events:,} events are later than tomorrow, the newest of {it}.",
        "They never count for a request of now, and spoil popularity and trends.",
        "Check the clocks (timedatectl) and --time-format and --timezone of the import.",
        lambda log, _: bool(log.future_events) and to_rfc3339(log.newest),
    ),
    Check(
        "heavy-weights",
        "warning",
        "The largest weight is {a.largest_weight:,g}, the mean {a.mean_weight:,.3g}.",
        "Few events outweigh all others: the weights look like amounts or numbers of articles.",
        "Import them with --weight-from COLUMN:log, or without weights.",
        lambda log, _: log.events >= _FEW and log.largest_weight > _HEAVY * log.mean_weight,
    ),
    Check(
        "ratings-as-weights",
        "warning",
        "The weights are {it}: they look like ratings.",
        "A bad rating would count as a little interest instead of as a dislike.",
        "Import them as ratings, with --dislikes-below.",
        _rating_weights,
    ),
    Check(
        "old-model",
        "warning",
        "The model in use is of {it[0]} and {it[1]:,} events; the log has {a.events:,}, the "
        "newest of {it[2]}.",
        "It does not know the items and habits that came since.",
        "Train again, with heed train or POST /v1/models/train, and do so regularly.",
        _old_model,
    ),
)
