"""Places of the state machine's servers: files, or a database that they share."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from service.maintenance.copying import copy_store
from service.runtime.data_layout import STORE_FILE
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.store import SQLiteStore
from tests.support.server import Server
from tests.support.tiny import World

Starts = Sequence[Callable[[], Server]]


class StatePlace(Protocol):
    """A place in which servers begin with the small world, as often as one asks."""

    world: World

    def begin(self, folder: Path) -> Starts:
        """Lay the world out again; return what starts each server, again after it has ended."""


class FilesPlace:
    """A data directory, and the one server of it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def begin(self, folder: Path) -> Starts:
        """See `StatePlace.begin`."""
        data = folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        self.world.copy(data)
        return [partial(Server, data)]


class DatabasePlace:
    """Two servers, with data directories of their own, over one database.

    Args:
        world: its models are in the directory of the first server.
        create_database: makes an empty one, and returns its URL.
    """

    def __init__(self, world: World, create_database: Callable[[], str]) -> None:
        self.world = world
        self._create_database = create_database

    def begin(self, folder: Path) -> Starts:
        """See `StatePlace.begin`."""
        url = self._create_database()
        asyncio.run(_copy(self.world.data / STORE_FILE, url))
        places = [folder / f"data-{number}" for number in range(2)]
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        self.world.copy(places[0])
        (places[0] / STORE_FILE).unlink()
        places[1].mkdir()
        return [partial(Server, place, store=url) for place in places]


async def _copy(path: Path, url: str) -> None:
    source, target = SQLiteStore(path), PostgresStore(url)
    await copy_store(source, target, "the small world")
    await target.close()
    await source.close()
