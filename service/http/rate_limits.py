"""Rates of API keys, counted in memory that forked processes share, or by a store."""

from __future__ import annotations

import asyncio
import fcntl
import math
import mmap
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct

from service.domain.errors import RateLimited, StoreUnreachable
from service.domain.keys import ApiKey, Rate
from service.stores.values import RateWindows

_SLOT = Struct("=QqqII")  # digest of the key, seconds of a window, its number, and two counts
_SLOTS = 16_384  # 512 KiB, of which only used pages take memory
_PROBES = 8  # slots in which one key may be


class SharedWindows:
    """A fixed table of counters, which processes share that are forked after its creation.

    Among more keys than it has room for, those whose windows are oldest start again from zero. A
    process that is killed while it counts blocks no other: the kernel drops its lock. Threads of
    one process must not use it at the same time.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("heed-rate-limits")
        else:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())
        os.ftruncate(self._descriptor, _SLOTS * _SLOT.size)
        self._table = mmap.mmap(self._descriptor, _SLOTS * _SLOT.size)

    def count(self, key: str, rate: Rate) -> float | None:
        """Count one request, or return in how many seconds the key may send more."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            return self._count(int.from_bytes(blake2b(key.encode(), digest_size=8).digest()), rate)
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _count(self, digest: int, rate: Rate) -> float | None:
        now, seconds = time.monotonic(), rate.seconds  # a clock of all processes, set by nobody
        number = int(now // seconds)
        left = (number + 1) * seconds - now  # of this window
        offset, (_, length, last, previous, current) = self._slot(digest)
        if length != seconds or last < number - 1:
            previous = current = 0
        elif last == number - 1:
            previous, current = current, 0
        # The window before counts by the part of it that is still inside.
        if math.floor(previous * left / seconds + current) < rate.amount:
            _SLOT.pack_into(self._table, offset, digest, seconds, number, previous, current + 1)
            return None
        return min(left % (seconds / previous) if previous else left, left)

    def _slot(self, digest: int) -> tuple[int, tuple[int, int, int, int, int]]:
        """Return the slot of a key, or else the one among those of its digest that is oldest."""
        oldest, end = (0, (digest, 0, 0, 0, 0)), math.inf
        for probe in range(_PROBES):
            offset = (digest + probe) % _SLOTS * _SLOT.size
            slot = _SLOT.unpack_from(self._table, offset)
            if slot[0] == digest:
                return offset, slot
            ends = slot[1] * (slot[2] + 2)  # seconds at which its counts mean nothing any more
            if ends < end:
                oldest, end = (offset, (digest, 0, 0, 0, 0)), ends
        return oldest


# A store is not asked for each request: it grants a fiftieth of a rate at once, for a second.
_SHARE = 50
_MOST_GRANTED = 200  # requests
_VALIDITY = 1.0  # seconds


@dataclass
class _Granted:
    """Requests of one key that the store has granted, and that were not sent yet."""

    requests: int = 0
    until: float = 0.0  # monotonic
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class RateLimits:
    """Counts the requests of each key.

    Without a store that counts for several machines, workers share the counters if they are forked
    from the process that made this object. Within any window of a rate, a key has at most its
    amount of requests, as estimated by weighting the window before with the part of it that is
    still inside. While such a store does not answer, each machine keeps its own count.
    """

    def __init__(self) -> None:
        self._windows = SharedWindows()
        self._granted: defaultdict[str, _Granted] = defaultdict(_Granted)

    async def count(self, key: ApiKey, rate: Rate, windows: RateWindows | None = None) -> None:
        """Count one request of a key; `windows` are those of a store that counts for all machines.

        Raises:
            RateLimited: the key has sent as many as it may; the request is not counted.
        """
        try:
            if windows is None:
                wait = self._windows.count(key.key_id, rate)
            else:
                wait = await self._take(key, rate, windows)
        except StoreUnreachable:
            wait = self._windows.count(key.key_id, rate)
        if wait is not None:
            seconds = max(1, math.ceil(wait))
            raise RateLimited(
                f"The API key {key.name} may send {rate} requests; try again in {seconds} s.",
                seconds,
            )

    async def _take(self, key: ApiKey, rate: Rate, windows: RateWindows) -> float | None:
        """Take a request of those that the store granted; else return how long to wait."""
        granted = self._granted[key.key_id]
        async with granted.asking:
            if granted.requests == 0 or time.monotonic() >= granted.until:
                wanted = min(_MOST_GRANTED, max(1, rate.amount // _SHARE))
                granted.requests, wait = await windows.grant(key.key_id, rate, wanted)
                granted.until = time.monotonic() + _VALIDITY
                if granted.requests == 0:
                    return wait
            granted.requests -= 1
            return None
