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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from math import floor
from struct import Struct

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import SlidingWindowCounterSupport, Storage
from limits.strategies import SlidingWindowCounterRateLimiter

from service.domain.errors import RateLimited, StoreUnreachable
from service.domain.keys import ApiKey, Rate
from service.stores.values import RateWindows

_SLOT = Struct("=QqqII")  # digest of the key, seconds of a window, its number, and two counts
_SLOTS = 16_384  # 512 KiB, of which only used pages take memory
_PROBES = 8  # slots in which one key may be


class SharedWindows(Storage, SlidingWindowCounterSupport):
    """A fixed table of counters, which processes share that are forked after its creation.

    Among more keys than it has room for, those whose windows are oldest start again from zero. A
    process that is killed while it counts blocks no other: the kernel drops its lock. Threads of
    one process must not use it at the same time.
    """

    STORAGE_SCHEME = None

    def __init__(self) -> None:
        super().__init__()
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("heed-rate-limits")
        else:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())
        os.ftruncate(self._descriptor, _SLOTS * _SLOT.size)
        self._table = mmap.mmap(self._descriptor, _SLOTS * _SLOT.size)

    # ------------------------------------------------------------------ sliding windows

    def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        """Count `amount` requests, unless the weighted count would exceed `limit`."""
        with self._locked():
            offset, number, spent, previous, current = self._read(key, expiry)
            if floor(previous * (1 - spent / expiry) + current) + amount > limit:
                return False
            counts = (previous, current + amount)
            _SLOT.pack_into(self._table, offset, _digest(key), expiry, number, *counts)
            return True

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Return the previous window's count and seconds to live, and the current one's."""
        with self._locked():
            _, _, spent, previous, current = self._read(key, expiry)
        return previous, expiry - spent, current, 2 * expiry - spent

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Forget the counts of a key."""
        with self._locked():
            offset = self._read(key, expiry)[0]
            self._table[offset : offset + _SLOT.size] = bytes(_SLOT.size)

    def _read(self, key: str, expiry: int) -> tuple[int, int, float, int, int]:
        """Return the slot's offset, the window's number, seconds spent in it, and both counts."""
        now = time.monotonic()  # the same clock in all processes, and nobody sets it
        number = int(now // expiry)
        offset, found = self._slot(_digest(key))
        _, _, last, previous, current = found
        if found[1] != expiry or last < number - 1:
            previous = current = 0
        elif last == number - 1:
            previous, current = current, 0
        return offset, number, now - number * expiry, previous, current

    def _slot(self, digest: int) -> tuple[int, tuple[int, int, int, int, int]]:
        """Return the slot of a key, or else the one among those of its digest that is oldest."""
        oldest, end = (0, (digest, 0, 0, 0, 0)), float("inf")
        for probe in range(_PROBES):
            offset = (digest + probe) % _SLOTS * _SLOT.size
            slot = _SLOT.unpack_from(self._table, offset)
            if slot[0] == digest:
                return offset, slot
            ends = slot[1] * (slot[2] + 2)  # seconds at which its counts mean nothing any more
            if ends < end:
                oldest, end = (offset, (digest, 0, 0, 0, 0)), ends
        return oldest

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    # ------------------------------------------------------------------ the rest of a storage
    # The library's limiter takes only a whole `Storage`, and calls none of what follows.

    @property
    def base_exceptions(self) -> type[Exception]:
        """Exceptions of the storage itself."""
        return OSError

    def check(self) -> bool:
        """Memory always answers."""
        return True

    def reset(self) -> int | None:
        """Forget all counts; their number is not known."""
        with self._locked():
            self._table[:] = bytes(len(self._table))
        return None

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        raise NotImplementedError("only sliding windows")

    def get(self, key: str) -> int:
        raise NotImplementedError("only sliding windows")

    def get_expiry(self, key: str) -> float:
        raise NotImplementedError("only sliding windows")

    def clear(self, key: str) -> None:
        raise NotImplementedError("only sliding windows")


def _digest(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") or 1


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
        self._limiter = SlidingWindowCounterRateLimiter(SharedWindows())
        self._granted: defaultdict[str, _Granted] = defaultdict(_Granted)

    async def count(self, key: ApiKey, rate: Rate, windows: RateWindows | None = None) -> None:
        """Count one request of a key.

        Args:
            key: of the request.
            rate: of the key.
            windows: of a store that counts for several machines.

        Raises:
            RateLimited: the key has sent as many as it may; the request is not counted.
        """
        if windows is not None:
            try:
                wait = await self._take(key, rate, windows)
            except StoreUnreachable:
                wait = self._hit(key, rate)
        else:
            wait = self._hit(key, rate)
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

    def _hit(self, key: ApiKey, rate: Rate) -> float | None:
        """Count a request on this machine only; return how long to wait if it is not allowed."""
        item = _item(rate)
        if self._limiter.hit(item, key.key_id):
            return None
        return self._limiter.get_window_stats(item, key.key_id).reset_time - time.time()


@cache
def _item(rate: Rate) -> RateLimitItem:
    return RateLimitItemPerSecond(rate.amount, rate.seconds)
