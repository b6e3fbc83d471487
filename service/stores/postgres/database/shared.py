"""Connections and notices of one database, which all stores of a process share."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Self

from service.stores.postgres.database.connections import Connections
from service.stores.postgres.database.notices import Notices

_lock = threading.Lock()
_open: dict[str, SharedDatabase] = {}


@dataclass
class SharedDatabase:
    """A database that a process uses; each calls `open_database` or `join`, and `close` once."""

    url: str
    connections: Connections
    notices: Notices
    users: int = 0

    def join(self) -> Self:
        """Return the database for another user."""
        with _lock:
            self.users += 1
        return self

    async def close(self) -> None:
        """Give the database up; the last user closes its connections."""
        if self._is_last():
            await asyncio.to_thread(self.notices.close)
            await self.connections.close()

    def abandon(self) -> None:
        """Give the database up where nothing was done with it on any event loop."""
        if self._is_last():
            self.notices.close()
            self.connections.abandon()

    def _is_last(self) -> bool:
        with _lock:
            self.users -= 1
            if self.users == 0 and _open.get(self.url) is self:
                del _open[self.url]
            return self.users == 0


def open_database(url: str) -> SharedDatabase:
    """Return the process's database of a URL. Raises `Invalid` for a URL that is none."""
    with _lock:
        database = _open.get(url)
        if database is None:
            connections = Connections(url)
            database = _open[url] = SharedDatabase(url, connections, Notices(connections))
        database.users += 1
        return database
