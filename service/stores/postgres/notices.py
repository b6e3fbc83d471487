"""Notices of what other processes have changed, and what all stores of a process share.

Requests need the versions of the catalogue and of the keys, and must not ask the server for them. A
thread reads the small table of namespaces when it is notified, and twice a second in any case: a
missed notice costs half a second, never the truth.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import psycopg

from service.runtime.logs import log_failure
from service.stores.postgres.connections import Connections
from service.stores.postgres.faults import explain
from service.stores.postgres.pool import cut_after

CHANNEL = "heed"
NOTIFY = f"SELECT pg_notify('{CHANNEL}', '')"
_INTERVAL = 0.5  # seconds between two readings, at most
_RETRY = 0.5  # seconds after a connection was lost
_PATIENCE = 2.0  # seconds of one reading: then the server hangs, and another may be the primary
_READ = b"SELECT name, namespace_no, created, catalogue, keys, namespace_id FROM heed.namespaces"

_log = logging.getLogger(__name__)


class NamespaceNotice(NamedTuple):
    """A namespace as it was at the last reading."""

    namespace_no: int
    created: int  # microseconds UTC
    catalogue: int  # version
    keys: int  # version
    namespace_id: str


class Notices:
    """Follows the namespaces of a database from the first question on."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._found: Mapping[str, NamespaceNotice] = {}
        self._own: dict[str, tuple[int, int]] = {}  # versions of this process's own changes

    def namespaces(self) -> Mapping[str, NamespaceNotice]:
        """Return all namespaces by name, as of half a second ago at most while the server answers.

        The first call reads them. Raises `Unavailable` where it cannot.
        """
        if self._thread is None:
            self._start()
        return self._found

    def versions(self, name: str) -> tuple[int, int]:
        """Return the versions of the catalogue and of the keys: own changes at once."""
        found = self.namespaces().get(name)
        catalogue, keys = self._own.get(name, (0, 0))
        if found is None:
            return catalogue, keys
        return max(found.catalogue, catalogue), max(found.keys, keys)

    def note(self, name: str, *, catalogue: int = 0, keys: int = 0) -> None:
        """Note a change that this process has committed."""
        with self._lock:
            before = self._own.get(name, (0, 0))
            self._own[name] = max(before[0], catalogue), max(before[1], keys)

    def close(self) -> None:
        """Stop following."""
        self._closing.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._closing.is_set():
                return
            with self._connections.plain() as connection:
                self._read(connection)
            self._thread = threading.Thread(target=self._follow, name="heed-notices", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        is_lost = False
        while not self._closing.is_set():
            try:
                with self._connections.connect() as connection:
                    with cut_after(_PATIENCE, connection):
                        connection.execute(f"LISTEN {CHANNEL}".encode())
                    if is_lost:
                        _log.info("PostgreSQL's notices are followed again")
                    is_lost = False
                    while not self._closing.is_set():
                        self._read(connection)
                        for _ in connection.notifies(timeout=_INTERVAL, stop_after=1):
                            pass
            except psycopg.Error as error:
                if not is_lost:
                    what = "PostgreSQL's notices are not followed; it is tried twice a second"
                    log_failure(_log, what, explain(error))
                is_lost = True
                self._closing.wait(_RETRY)

    def _read(self, connection: psycopg.Connection) -> None:
        with cut_after(_PATIENCE, connection):
            rows = connection.execute(_READ).fetchall()
        self._found = {name: NamespaceNotice(*rest) for name, *rest in rows}


_opening = threading.Lock()
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
        with _opening:
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
        with _opening:
            self.users -= 1
            if self.users == 0 and _open.get(self.url) is self:
                del _open[self.url]
            return self.users == 0


def open_database(url: str) -> SharedDatabase:
    """Return the process's database of a URL. Raises `Invalid` for a URL that is none."""
    with _opening:
        database = _open.get(url)
        if database is None:
            connections = Connections(url)
            database = _open[url] = SharedDatabase(url, connections, Notices(connections))
        database.users += 1
        return database
