"""Places for requests that are arriving; one sender has at most a share of them.

A sender is an API key, or the address of a client without one. A body that arrives within `GRACE`
takes no place, so that a proxy may send any number of fast requests under one key.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial

from starlette.types import Scope

from service.domain.errors import Overloaded
from service.domain.keys import ApiKey
from service.domain.settings import Settings
from service.http.access.access_control import KEY
from service.http.telemetry import Metrics

GRACE = 1.0  # seconds after which a header or a body is slow, and takes a place of its sender


class Places:
    """Places of one kind: at most `limit` in all, and `share` for each sender."""

    def __init__(
        self, limit: int, share: int, refused: Callable[[], None], *, kind: str, setting: str
    ) -> None:
        self._limit = limit
        self._share = share
        self._refused = refused
        self._kind = kind
        self._setting = setting
        self._held: Counter[str] = Counter()
        self.taken = 0

    def take(self, sender: str, amount: int = 1) -> None:
        """Take places for a sender. Raises `Overloaded`, which names the bound."""
        if self.taken + amount > self._limit:
            self._refused()
            raise Overloaded(f"All {self._limit} {self._kind} are taken ({self._setting}).")
        if self._held[sender] + amount > self._share:
            self._refused()
            raise Overloaded(
                f"{sender} holds its share of the {self._kind}: {self._share} of {self._limit} "
                f"({self._setting})."
            )
        self._held[sender] += amount
        self.taken += amount

    def give_back(self, sender: str, amount: int = 1) -> None:
        """Free places of a sender."""
        self.taken -= amount
        self._held[sender] -= amount
        if not self._held[sender]:
            del self._held[sender]


class Arrivals:
    """The places of one worker, which its connections and the readers of bodies share."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        count = metrics.count_refusal
        self.count_closed = partial(count, "connections")
        self.slow = Places(
            settings.max_connections,
            max(1, settings.max_connections // 4),
            self.count_closed,
            kind="connections for slow requests",
            setting="HEED_MAX_CONNECTIONS",
        )
        self.buffered = Places(
            settings.max_buffered_bytes,
            max(settings.max_body_bytes, settings.max_buffered_bytes // 4),
            partial(count, "bodies"),
            kind="bytes for bodies",
            setting="HEED_MAX_BUFFERED_BYTES",
        )
        self.streams = Places(
            settings.max_streams,
            max(1, settings.max_streams // 2),
            partial(count, "streams"),
            kind="streams",
            setting="HEED_MAX_STREAMS",
        )
        metrics.watch_places("streams", settings.max_streams, lambda: self.streams.taken)


class SlowPlace:
    """Takes a place among the slow requests if a request is still arriving after `GRACE`.

    Calls `refuse` with the reason if none is free.
    """

    def __init__(self, places: Places, sender: str, refuse: Callable[[str], None]) -> None:
        self._places = places
        self._sender = sender
        self._refuse = refuse
        self._is_taken = False
        self._timer = asyncio.get_running_loop().call_later(GRACE, self._take)

    def _take(self) -> None:
        try:
            self._places.take(self._sender)
        except Overloaded as error:
            self._refuse(error.detail)
        else:
            self._is_taken = True

    def release(self) -> None:
        """Stop the timer, and free the place if it was taken."""
        self._timer.cancel()
        if self._is_taken:
            self._is_taken = False
            self._places.give_back(self._sender)


def sender_of(scope: Scope) -> str:
    """Name the sender of a request: its key, or else its client's address."""
    key: ApiKey | None = scope.get(KEY)
    if key is not None:
        return f"The API key {key.name} ({key.key_id})"
    return address_of(scope.get("client"))


def address_of(client: tuple[str, int] | None) -> str:
    """Name a client by its address; all of an IPv6 network of 64 bits count as one client.

    Headers of proxies are not believed, for any client can send them.
    """
    return "A local client" if client is None else _named(client[0])


@lru_cache(maxsize=4096)
def _named(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return f"The address {host}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"The network {ipaddress.ip_network((address, 64), strict=False)}"
        address = address.ipv4_mapped
    return f"The address {address}"
