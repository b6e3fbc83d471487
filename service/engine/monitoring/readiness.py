"""Readiness of an engine: whether store, disk and model answer requests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.runtime.file_paths import without_folders
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
