"""An installation as the checks see it: read once, and never changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import httpx
import psycopg
from prometheus_client.parser import text_string_to_metric_families

from service.domain.errors import HeedError
from service.domain.settings import PREFIX, Settings
from service.runtime.data_layout import FIRST_KEY_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.version_files import Manifest, check_chunks, read_file, read_manifest, unseal
from service.stores.postgres.server_state import ServerState
from service.stores.postgres.shared_files import SharedFiles
from service.stores.sqlite.database_file import read_store_file
from service.stores.sqlite.schema import SCHEMA_VERSION

DAY = 86_400_000_000  # microseconds
MOST_WEIGHTS = 20  # distinct weights that are listed
_DESCRIPTION = "model.json"  # of the files of a version
_PATIENCE = 10.0  # seconds for a busy service to answer; without a listener, the error is immediate
_REFUSED = (401, 403)


class Disk(NamedTuple):
    """Bytes of the file system that holds the data."""

    total: int
    free: int


class ServedModel(NamedTuple):
    """The model in use, as its files describe it."""

    manifest: Manifest
    text_encoder: str
    event_types: tuple[str, ...]


class LogSummary(NamedTuple):
    """Aggregates of a store. Times are microseconds UTC, and 0 without events."""

    stated_events: int  # by the store's counter
    events: int  # counted
    users: int  # with events
    items: int  # in the catalogue
    events_by_type: Mapping[str, int]
    unknown_item_events: int  # whose item is not in the catalogue
    oldest: int
    newest: int
    future_events: int  # later than a day from now
    largest_user: int  # events of the user who has most
    largest_item: int  # events of the item that has most
    mean_weight: float
    largest_weight: float
    weights: tuple[float, ...]  # distinct, ascending; empty for more than MOST_WEIGHTS


@dataclass(frozen=True, slots=True)
class Installation:
    """Settings, environment and machine of an installation."""

    settings: Settings
    environment: Mapping[str, str]
    now: int  # microseconds UTC
    disk: Disk
    metrics: Mapping[str, float] | None  # of the running service by name; None: none is reachable
    encoder: str | None  # name of the text encoder; None: it cannot be opened
    backup_days: int  # age from which on a backup is old
    server: ServerState | None = None  # of the database; None: the store is a file, or unreachable


@dataclass(frozen=True, slots=True)
class NamespaceData:
    """One namespace: its directory on this machine, and what was read of it."""

    name: str
    data: Path
    log: LogSummary | None  # None: the store cannot be read
    model: ServedModel | None  # None: no model is in use, or it cannot be read


# ------------------------------------------------------------------------------- event logs

_BY_TYPE = """\
SELECT type, count(*), sum(CASE WHEN document IS NULL THEN 1 ELSE 0 END), min(timestamp),
       max(timestamp), sum(CASE WHEN timestamp > {tomorrow} THEN 1 ELSE 0 END), sum(weight),
       max(weight)"""
_MOST = "SELECT count(*), coalesce(max(n), 0) FROM (SELECT count(*) AS n {events}) AS counted"
_WEIGHTS = f"SELECT DISTINCT weight {{events}} LIMIT {MOST_WEIGHTS + 1}"
_SQLITE_JOINS = " FROM events JOIN items USING (item_no) JOIN types USING (type_no)"
_SQLITE_STATED = "SELECT items, events FROM state"
_POSTGRES_JOINS = """
  FROM heed.events JOIN heed.types USING (namespace_no, type_no)
  LEFT JOIN heed.items USING (namespace_no, item_no)"""
_POSTGRES_STATED = """\
SELECT items, (SELECT coalesce(sum(events), 0)::bigint FROM heed.tallies
                WHERE tallies.namespace_no = namespaces.namespace_no)
  FROM heed.namespaces WHERE namespace_no = {no}"""


def summarise(connection: apsw.Connection, tomorrow: int) -> LogSummary:
    """Read the whole log of a SQLite store; events after `tomorrow` are those of the future."""
    connection.execute("BEGIN")
    try:
        return _summary(
            lambda query: connection.execute(query).fetchall(),
            stated=_SQLITE_STATED,
            by_type=_BY_TYPE.format(tomorrow=tomorrow) + _SQLITE_JOINS,
            events="FROM events",
            user="user_no",
        )
    finally:
        connection.execute("ROLLBACK")


def summarise_database(
    connection: psycopg.Connection, namespace_no: int, tomorrow: int
) -> LogSummary:
    """Read the whole log of a namespace of a database, in the transaction of the connection."""
    of_namespace = f" WHERE namespace_no = {namespace_no}"
    return _summary(
        lambda query: connection.execute(query.encode()).fetchall(),
        stated=_POSTGRES_STATED.format(no=namespace_no),
        by_type=_BY_TYPE.format(tomorrow=tomorrow) + _POSTGRES_JOINS + of_namespace,
        events=f"FROM heed.events{of_namespace}",
        user="user_key",
    )


def _summary(
    rows: Callable[[str], list[Any]], *, stated: str, by_type: str, events: str, user: str
) -> LogSummary:
    ((items, stated_events),) = rows(stated)
    types = rows(f"{by_type} GROUP BY type")
    ((users, largest_user),) = rows(_MOST.format(events=f"{events} GROUP BY {user}"))
    ((_, largest_item),) = rows(_MOST.format(events=f"{events} GROUP BY item_no"))
    weights = rows(_WEIGHTS.format(events=events))
    count = sum(row[1] for row in types)
    return LogSummary(
        stated_events=stated_events,
        events=count,
        users=users,
        items=items,
        events_by_type={row[0]: row[1] for row in types},
        unknown_item_events=sum(row[2] for row in types),
        oldest=min((row[3] for row in types), default=0),
        newest=max((row[4] for row in types), default=0),
        future_events=sum(row[5] for row in types),
        largest_user=largest_user,
        largest_item=largest_item,
        mean_weight=sum(row[6] for row in types) / max(count, 1),
        largest_weight=max((row[7] for row in types), default=0.0),
        weights=tuple(sorted(row[0] for row in weights)) if len(weights) <= MOST_WEIGHTS else (),
    )


def read_log(data: Path, now: int) -> LogSummary | None:
    """Summarise a store of this version; None if it is of another, damaged or missing."""
    try:
        with read_store_file(data / STORE_FILE) as store:
            if store.schema != SCHEMA_VERSION:
                return None
            return summarise(store.connection, now + DAY)
    except HeedError:
        return None


# ----------------------------------------------------------------------------------- models


def read_model(data: Path) -> ServedModel | None:
    """Describe the model in use; None without one, or if its files cannot be read."""
    folder = data / MODELS_FOLDER
    try:
        current = str(unseal(read_file(folder, "current"), "current")["version"])
        directory = folder / "versions" / current
        return _served_model(read_manifest(directory), read_file(directory, _DESCRIPTION))
    except (HeedError, OSError, ValueError, KeyError, TypeError):
        return None


def read_shared_model(files: SharedFiles, manifest: Manifest) -> ServedModel | None:
    """Verify all chunks of a version, and describe it.

    Raises:
        Corrupt: a chunk is damaged.
    """
    with closing(files.read(manifest.version)) as chunks:
        parts = check_chunks(manifest, chunks)
        content = b"".join([data for name, data in parts if name == _DESCRIPTION])
    try:
        return _served_model(manifest, content)
    except (ValueError, KeyError, TypeError):
        return None


def _served_model(manifest: Manifest, content: bytes | bytearray) -> ServedModel:
    it = json.loads(content)
    return ServedModel(manifest, str(it["text_encoder"]), tuple(it["event_types"]))


# -------------------------------------------------------------------------- running service


class KeyRefused(HeedError):
    """The service answers its metrics only to holders of a key."""


def read_metrics(settings: Settings, environment: Mapping[str, str]) -> Mapping[str, float] | None:
    """Read the metrics of the running service, summed over its workers; None if none answers.

    Metrics of one cache are named with the label, such as `heed_cache_bytes{cache="history"}`. The
    key is the one in `HEED_API_KEY`, else one that the service keeps in a file.

    Raises:
        KeyRefused: the service needs a key, and accepts none that was found.
    """
    host = settings.host if settings.host not in ("", "0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
    if not settings.port:
        return None
    address = f"[{host}]" if ":" in host else host
    token = _find_token(settings, environment)
    try:
        answer = httpx.get(
            f"http://{address}:{settings.port}/metrics",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=_PATIENCE,
        )
        if answer.status_code in _REFUSED:
            raise KeyRefused(f"The running service answers /metrics with {answer.status_code}")
        answer.raise_for_status()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                cache = sample.labels.get("cache")
                name = sample.name if cache is None else f'{sample.name}{{cache="{cache}"}}'
                sums[name] = sums.get(name, 0.0) + sample.value
    except (httpx.HTTPError, ValueError):
        return None
    return sums if any(name.startswith("heed_") for name in sums) else None


def _find_token(settings: Settings, environment: Mapping[str, str]) -> str:
    """Return the caller's key, or the first one in a file; empty if there is none."""
    token = environment.get(f"{PREFIX}API_KEY", "").strip()
    for path in (settings.metrics_key_file, settings.data / FIRST_KEY_FILE):
        if not token and path:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                token = Path(path).read_text("ascii").strip()
    return token
