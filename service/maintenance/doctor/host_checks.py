"""Checks of the machine, the settings and the backups of an installation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from service.domain.errors import HeedError
from service.domain.settings import is_loopback, unknown_variables
from service.domain.timestamps import to_rfc3339
from service.maintenance.backups.manifest import read_backup_manifest
from service.maintenance.doctor.findings import Finding
from service.maintenance.doctor.installation import DAY, Installation, NamespaceData
from service.runtime.data_layout import LAST_BACKUP_FILE, STORE_FILE

_LEAST_FREE = 0.05  # of the disk
_HIT_RATE = 0.5
_REQUESTS = 1_000  # below which a hit rate says nothing
_EVENT_BYTES = 64  # of a cached history, for each event; without derived state

Namespaces = list[NamespaceData]


def check_variables(installation: Installation, _: Namespaces) -> Iterator[Finding]:
    """Find variables HEED_* that are no settings."""
    for sentence in unknown_variables(installation.environment):
        yield Finding(
            "unknown-variable",
            "warning",
            f"{sentence}.",
            "It has no effect: the default applies.",
            "Correct the name; docs/reference/settings.md lists all settings.",
        )


def check_exposure(installation: Installation, _: Namespaces) -> Iterator[Finding]:
    """Find settings by which other machines or other sites can read and write."""
    settings = installation.settings
    if not is_loopback(settings.host):
        yield Finding(
            "open-address",
            "warning" if settings.insecure else "error",
            f"HEED_HOST is {settings.host or 'every address'}"
            + (", and HEED_INSECURE allows it." if settings.insecure else "."),
            "Other machines can read and write everything, unless something else guards it."
            if settings.insecure
            else "The service refuses to start.",
            "Bind 127.0.0.1 behind a proxy that authenticates, or guard the network.",
        )
    if "*" in settings.allowed_hosts.split(","):
        yield Finding(
            "any-host",
            "warning",
            "HEED_ALLOWED_HOSTS allows every name.",
            "Pages of other sites can read and write by DNS rebinding.",
            "Name the hosts by which clients reach the service.",
        )


def check_disk(installation: Installation, namespaces: Namespaces) -> Iterator[Finding]:
    """Find a disk that is nearly full."""
    total, free = installation.disk
    stores = sum(_size(each.data / STORE_FILE) for each in namespaces)
    if free < max(_LEAST_FREE * total, stores):
        yield Finding(
            "disk-nearly-full",
            "warning",
            f"The disk of {installation.settings.data} has {free / 1e9:.1f} GB free of "
            f"{total / 1e9:.1f}; the stores have {stores / 1e9:.1f}.",
            "Writes are refused when it is full, and a migration needs room for a copy.",
            "Free space, prune models (heed models prune), or move the data to a larger disk.",
        )


def check_clock(installation: Installation, namespaces: Namespaces) -> Iterator[Finding]:
    """Find a clock that shows a time before the newest model was published."""
    created = [each.model.manifest.created for each in namespaces if each.model is not None]
    if created and installation.now < max(created):
        yield Finding(
            "clock-behind",
            "error",
            f"The clock shows {to_rfc3339(installation.now)}, but a model was published at "
            f"{to_rfc3339(max(created))}.",
            "New events get wrong times, and existing ones do not count yet.",
            "Set the clock (timedatectl) and keep it by NTP.",
        )


def check_cache(installation: Installation, namespaces: Namespaces) -> Iterator[Finding]:
    """Find a cache of histories that is too small: by its hit rate, or by the size of the log."""
    budget = installation.settings.history_cache_bytes
    if installation.metrics is not None:
        hits = installation.metrics.get('heed_cache_hits_total{cache="history"}', 0)
        requests = hits + installation.metrics.get('heed_cache_misses_total{cache="history"}', 0)
        if requests >= _REQUESTS and hits < _HIT_RATE * requests:
            yield Finding(
                "cache-misses",
                "warning",
                f"Of {requests:,.0f} histories, {hits / requests:.0%} were in the cache.",
                "The others are read from the store and encoded again, which takes longer.",
                f"Raise HEED_HISTORY_CACHE_BYTES, now {budget:,}.",
            )
        return
    need = _EVENT_BYTES * sum(each.log.events for each in namespaces if each.log is not None)
    if need > budget:
        yield Finding(
            "cache-small",
            "warning",
            f"The histories take about {need / 1e6:,.0f} MB in memory, and the cache has "
            f"{budget / 1e6:,.0f} MB.",
            "If most users are active, histories are read from the store again and again.",
            "Raise HEED_HISTORY_CACHE_BYTES, or run heed doctor while the service runs to see the "
            "hit rate.",
        )


def check_backup(installation: Installation, namespaces: Namespaces) -> Iterator[Finding]:
    """Find an installation whose last backup is old, gone, or was never made."""
    if not any(each.log is not None and each.log.events for each in namespaces):
        return
    why = "A broken disk, or a mistake, would lose what came since."
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
        yield Finding("no-backup", "warning", f"heed backup was never run{here}.", why, todo)
        return
    days = (installation.now - created) / DAY
    if days > installation.backup_days:
        what = f"The last backup is of {to_rfc3339(created)}, {days:.0f} days ago."
        yield Finding("old-backup", "warning", what, why, todo)
    try:
        read_backup_manifest(target)
    except (HeedError, OSError) as error:
        what = f"The last backup cannot be read here: {error}."
        yield Finding("missing-backup", "note", what, why, "Check where it is kept now.")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


HOST_CHECKS = (
    check_variables,
    check_exposure,
    check_disk,
    check_clock,
    check_cache,
    check_backup,
)
