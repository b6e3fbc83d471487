"""Connections to servers that are the primary no longer, which are cut.

A standby that is promoted begins a new timeline. The former primary may hang with connections that
stay open, or go on by itself: what it would acknowledge, the new one does not have. So a process
that has seen the newer timeline has nothing more to do with the older one.
"""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from service.stores.postgres.database.patience import cut_off

_OF_SERVERS = ("host", "hostaddr", "port")  # each a list, of as many as there are servers


class Timelines:
    """The newest timeline of each server that was seen, and the open connections of a process.

    Attributes:
        changes: number of times that a server was promoted or started anew, or that other servers
            were found in its place, so that it may lack what was read before without being
            committed safely.
        primary: host and port of the newest connection.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.primary: tuple[str, str] | None = None
        self._lock = threading.Lock()
        self._system: int | None = None  # identifier of the servers of the newest connection
        self._newest: dict[int, tuple[int, datetime]] = {}
        self._open: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    def is_elsewhere(self, row: tuple[Any, ...]) -> bool:
        """Report whether a new connection is to other servers, or a newer timeline, than before.

        Args:
            row: as `TIMELINE` returned it on the connection.
        """
        system, timeline, _ = row
        if not timeline or self._system is None:
            return False
        return bool(system != self._system or timeline > self._newest[system][0])

    def admit(self, connection: Connection | AsyncConnection, row: tuple[Any, ...] | None) -> bool:
        """Note a new connection with what `TIMELINE` returned on it; cut those it replaces.

        Returns:
            bool: whether earlier connections are to other servers, or to an older timeline.

        Raises:
            psycopg.OperationalError: another server has become the primary in its stead.
        """
        if row is None or not row[1]:
            return False
        system, timeline, started = row
        with self._lock:
            newest, latest = self._newest.get(system, (timeline, started))
            is_elsewhere = self.is_elsewhere(row)
            if timeline < newest:
                raise psycopg.OperationalError("another server was promoted in place of this one")
            self.changes += is_elsewhere or (timeline, started) != (newest, latest)
            self._newest[system] = timeline, started
            self._system = system
            self.primary = connection.info.host, str(connection.info.port)
            former = [
                each
                for each, (other, number) in self._open.items()
                if other == system and number < timeline
            ]
            for each in former:
                del self._open[each]
            self._open[connection] = system, timeline
        for each in former:
            cut_off(each)
        return is_elsewhere


def put_first(conninfo: str, server: tuple[str, str] | None) -> str:
    """Return a connection string of several servers with one first that is among them."""
    given = conninfo_to_dict(conninfo)
    lists = {name: str(given[name]).split(",") for name in _OF_SERVERS if given.get(name)}
    hosts = lists.get("host", [])
    ports = lists.get("port", ["5432"])
    servers = list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False))
    if server is None or server not in servers[1:]:
        return conninfo
    at = servers.index(server)
    for values in lists.values():
        if len(values) == len(servers):
            values.insert(0, values.pop(at))
    return make_conninfo(conninfo, **{name: ",".join(each) for name, each in lists.items()})
