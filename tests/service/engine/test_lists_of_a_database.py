"""Recommendations for all users of a PostgreSQL database that several machines share."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from service.domain.settings import Settings
from service.engine import lists as recommend_all
from service.engine.lists import Listed, write_lists
from service.stores.postgres.store import PostgresStore
from tests.support import asking
from tests.support.postgres_server import PostgresDatabases
from tests.support.tiny import NOON, World, events, items

ALL = asking.recommend(asking.who(at=NOON))


class StoppedError(Exception):
    """Raised in the middle of a run."""


def populate(url: str) -> str:
    """Put the small world into a database."""

    async def put() -> None:
        store = PostgresStore(url, namespace="default", create=True)
        await store.put_items(items())
        await store.append(events())
        await store.close()

    asyncio.run(put())
    return url


@pytest.fixture(scope="module")
def url(postgres: PostgresDatabases) -> str:
    """A database with the small world."""
    return populate(postgres.create_database())


@pytest.fixture
def machines(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Data directories of two machines, with the same models; runs compute four lists at a time."""
    monkeypatch.setattr(recommend_all, "_BATCH", 4)
    monkeypatch.setattr(recommend_all, "_PART", 4)
    return [world.copy(tmp_path / name) for name in ("one", "two")]


def make(data: Path, url: str, out: Path, **options: Any) -> tuple[Listed, list[str]]:
    """Write lists on a machine; return counts, and what was announced."""
    said: list[str] = []
    options = {"progress": lambda *_: None, "writing": print, "announce": said.append} | options
    settings = Settings(data=data, store=url)
    return asyncio.run(write_lists(settings, out, ALL, **options)), said


def stop(done: int, _total: int) -> None:
    """Stop a run that has computed half of the lists."""
    if done >= 20:
        raise StoppedError


def test_another_machine_goes_on(machines: list[Path], url: str, tmp_path: Path) -> None:
    """A run that stopped on one machine is continued by another over the same database."""
    whole, _ = make(machines[0], url, tmp_path / "whole.parquet")
    with pytest.raises(StoppedError):
        make(machines[0], url, tmp_path / "x.parquet", progress=stop)
    listed, said = make(machines[1], url, tmp_path / "x.parquet")
    assert (whole.computed, listed.computed) == (40, 20)
    assert said[0].startswith("Continuing the interrupted run: 20 of 40 users")
    assert (tmp_path / "x.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_another_database_is_another_store(
    machines: list[Path], url: str, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """Lists of one database are not mixed with those of another, nor with those of a file."""
    other = populate(postgres.create_database())
    for number, place in enumerate((url, other, "")):
        with pytest.raises(StoppedError):
            make(machines[0], place, tmp_path / "x.csv", progress=stop)
        said: list[str] = []
        for again in (place, ("", url, other)[number]):
            with pytest.raises(StoppedError):
                make(machines[0], again, tmp_path / "x.csv", progress=stop, announce=said.append)
        assert "Continuing" in said[0]
        assert "of another store" in said[1]
        shutil.rmtree(tmp_path / "x.csv.progress")
