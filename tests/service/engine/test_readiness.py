"""Readiness checks of the disk, with the store and the model well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.domain.errors import HeedError
from service.domain.records import Event
from service.engine import monitoring
from service.snapshots.live_snapshot import LiveSnapshot
from service.stores.sqlite.store import SQLiteStore

LIVE = cast(
    LiveSnapshot,
    SimpleNamespace(snapshot=SimpleNamespace(version="v1"), served=SimpleNamespace(fault=None)),
)


async def checked(data: Path, *, then: Callable[[SQLiteStore], Any] = lambda _: None) -> Any:
    """Return whether an engine is ready, and its checks, after something is done to its store."""
    store = SQLiteStore(data.parent / "store.db")
    try:
        if (work := then(store)) is not None:
            with contextlib.suppress(HeedError):
                await work
        return await monitoring.check(store, LIVE, data)
    finally:
        await store.close()


async def test_a_full_disk_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with less room than a checkpoint needs fails its check, with the numbers."""
    data = tmp_path / "data"
    data.mkdir()
    assert (await checked(data))[0]
    monkeypatch.setattr(monitoring, "MIN_FREE_BYTES", 1 << 60)
    is_ready, checks = await checked(data)
    assert not is_ready
    assert (checks["store"], checks["disk"]) == (True, False)
    assert 0 < checks["details"]["disk"]["free_bytes"] < 1 << 60


async def test_a_vanished_data_directory_is_not_ready(tmp_path: Path) -> None:
    """A data directory that is gone fails the check of the disk, which says why."""
    is_ready, checks = await checked(tmp_path / "gone")
    assert not is_ready
    assert not checks["disk"]
    assert "No such file" in checks["details"]["disk"]["error"]


async def test_what_is_wrong_with_the_store_names_no_folder(tmp_path: Path) -> None:
    """A store that takes no more writes fails its check, by the name of its file only."""

    def lose(store: SQLiteStore) -> Any:
        (tmp_path / "store.db").unlink()
        return store.append([Event("u", "i")])

    is_ready, checks = await checked(tmp_path / "data", then=lose)
    assert not is_ready
    assert not checks["store"]
    said = checks["details"]["store"]["problem"]
    assert "store.db" in said
    assert str(tmp_path) not in said
