"""Measurements of an engine and its parts, and whether it can answer."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.domain.errors import HeedError
from service.engine.compose import Parts
from service.jobs.runner import JobRunner
from service.runtime.data_layout import without_folders
from service.runtime.tracing import Measurement
from service.snapshots.live_snapshot import LiveSnapshot
from service.stores.base import Store

# Writes fail below about 1 MiB; a checkpoint needs room for the pages of its log.
MIN_FREE_BYTES = 16 << 20


async def check(store: Store, live: LiveSnapshot, data: Path) -> tuple[bool, Mapping[str, Any]]:
    """Return whether requests can be answered, and the result of each check.

    `store` and `disk` are true or false, `model` is the version that answers, and `details` has the
    numbers behind them.
    """
    problem = await store.problem()
    free, fault = await asyncio.to_thread(_free_bytes, data)
    has_room = free >= MIN_FREE_BYTES
    disk: dict[str, Any] = {"free_bytes": free, "needed_bytes": MIN_FREE_BYTES}
    if fault:
        disk["error"] = fault
    details: dict[str, Any] = {"disk": disk, "model": _model(live, data)}
    if problem is not None:
        details["store"] = {"problem": without_folders(problem, data)}
    checks = {
        "store": problem is None,
        "disk": has_room,
        "model": live.snapshot.version,
        "details": details,
    }
    return problem is None and has_room, checks


def _model(live: LiveSnapshot, data: Path) -> dict[str, Any]:
    if live.served.fault is None:
        return {"degraded": False}
    return {"degraded": True, "fault": without_folders(live.served.fault, data)}


def _free_bytes(data: Path) -> tuple[int, str]:
    """Return the free bytes of the data directory's disk, 0 with a reason where it is gone."""
    try:
        return shutil.disk_usage(data).free, ""
    except OSError as error:
        return 0, error.strerror or type(error).__name__


async def measure(
    parts: Parts, jobs: JobRunner, ready: tuple[bool, Mapping[str, Any]]
) -> list[Measurement]:
    """Measure the parts of an engine, and its readiness.

    Counts of the store are left out while it does not pass its check.
    """
    is_ready, checks = ready
    stored: list[Measurement] = []
    if checks.get("store", True):
        with suppress(HeedError):
            stored = await _stored(parts)
    disk = shutil.disk_usage(parts.settings.data)
    found = [
        _gauge("ready", "1 when requests are answered, as at /health/ready.", is_ready),
        *(
            _gauge("ready_check", "1 when a check of /health/ready passes.", passes, check=name)
            for name, passes in checks.items()
            if isinstance(passes, bool)
        ),
        _gauge("disk_free_bytes", "Bytes free for the data directory.", disk.free),
        _gauge("disk_total_bytes", "Bytes of the disk of the data directory.", disk.total),
    ]
    found += _store(parts)
    found += _caches(parts)
    found += _snapshot(parts.live)
    found += _event_log(parts)
    found += stored
    found += _jobs(jobs)
    return found


async def _stored(parts: Parts) -> list[Measurement]:
    """Measure the store, and what is behind it. Raises `HeedError` where it cannot be read."""
    store, catalogue = parts.store, parts.live.catalogue
    counts = await store.counts()
    behind = max(0, await store.catalogue_version() - catalogue.version)
    lacking = max(0, await store.clock() - parts.event_log.loaded.version)
    return [
        *(_gauge(name, f"Stored {name}.", counts[name]) for name in ("users", "items", "events")),
        _gauge(
            "catalogue_lag_versions", "Changes of the stored catalogue that are not served.", behind
        ),
        _gauge(
            "catalogue_lag_seconds",
            "Seconds since the oldest change of the stored catalogue that is not served.",
            catalogue.lag_seconds if behind else 0.0,
        ),
        _gauge(
            "event_log_lag_versions",
            "Changes of the store that the log in RAM lacks until a question needs it.",
            lacking,
        ),
    ]


def _store(parts: Parts) -> Iterator[Measurement]:
    store = parts.store.measures()
    yield _gauge("store_database_bytes", "Bytes of the database file.", store.database_bytes)
    yield _gauge("store_wal_bytes", "Bytes of the write-ahead log's file.", store.log_bytes)
    yield _gauge(
        "store_wal_pages",
        "Pages in the write-ahead log at the last commit since the last checkpoint.",
        store.log_pages,
    )
    yield _gauge("store_queued_rows", "Rows accepted and not yet committed.", store.queued_rows)
    yield _counter("store_commits_total", "Transactions committed.", store.commits)
    yield _counter(
        "store_checkpoints_total", "Copies of the log into the database.", store.checkpoints
    )
    yield _counter(
        "store_failures_total", "Calls of the store that failed for its own fault.", store.failures
    )
    yield _gauge("store_failed", "1 once nothing is written until a restart.", store.failed)


def _caches(parts: Parts) -> Iterator[Measurement]:
    stats = parts.memories.stats()
    memory_bytes = stats["cached_memory_bytes"]
    sizes = {
        "history": (stats["cached_histories"], stats["cached_history_bytes"] - memory_bytes),
        "memory": (stats["cached_memories"], memory_bytes),
    }
    for cache, (users, size) in sizes.items():
        hits, misses = stats[f"{cache}_hits"], stats[f"{cache}_misses"]
        yield _counter("cache_hits_total", "Look-ups that the cache answered.", hits, cache=cache)
        yield _counter(
            "cache_misses_total", "Look-ups that it did not answer.", misses, cache=cache
        )
        yield _gauge("cache_users", "Users that the cache holds.", users, cache=cache)
        yield _gauge("cache_bytes", "Bytes that the cache holds.", size, cache=cache)
    yield _gauge(
        "cache_limit_bytes",
        "Bytes that both caches may hold together.",
        parts.settings.history_cache_bytes,
    )
    yield _gauge(
        "long_histories", "Long histories whose older events are held.", stats["long_histories"]
    )
    yield _gauge(
        "long_histories_waiting_for_lists",
        "Long histories whose items are attended one by one until their lists are built.",
        stats["long_histories_waiting_for_lists"],
    )


def _snapshot(live: LiveSnapshot) -> Iterator[Measurement]:
    indexes = live.indexes
    yield _gauge("catalogue_rows", "Items of the served snapshot.", len(live.snapshot.catalogue))
    yield _gauge(
        "snapshot_age_seconds",
        "Seconds since the served snapshot last changed.",
        time.monotonic() - live.served.replaced_at,
    )
    yield _gauge("model_info", "The served model.", 1, version=live.snapshot.version)
    is_older = live.served.fault is not None
    yield _gauge("model_degraded", "1 when an older model answers than the current one.", is_older)
    if (created := live.served.model_created) is not None:
        age = max(0.0, time.time() - created / 1e6)
        yield _gauge("model_age_seconds", "Seconds since the served model was published.", age)
    yield _counter("index_builds_total", "Indexes built beside requests.", indexes.builds)
    yield _counter("index_build_failures_total", "Builds of indexes that failed.", indexes.failures)
    yield _counter(
        "index_build_seconds_total", "Seconds that builds of indexes took.", indexes.build_seconds
    )
    yield _gauge("index_building", "1 while indexes are built.", indexes.is_building)


def _event_log(parts: Parts) -> Iterator[Measurement]:
    log = parts.event_log
    yield _gauge("logged_events", "Events of the log in RAM.", len(log.loaded.log))
    yield _counter(
        "event_log_load_seconds_total", "Seconds that reading the log took.", log.load_seconds
    )


def _jobs(jobs: JobRunner) -> Iterator[Measurement]:
    for state, count in jobs.ended.items():
        yield _counter("jobs_total", "Trainings that ended here, by state.", count, state=state)
    yield _gauge("job_running", "1 while a training runs in this worker.", jobs.running_for > 0)
    yield _gauge(
        "job_running_seconds", "Seconds that the training has run so far.", jobs.running_for
    )
    yield _gauge("job_last_seconds", "Seconds that the last training took.", jobs.last_seconds)


def _gauge(name: str, description: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "gauge", description, float(value), labels)


def _counter(name: str, description: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "counter", description, float(value), labels)
