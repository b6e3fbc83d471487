"""Counters of sliding windows in memory that forked processes share.

It is a storage of the library `limits`, whose own storages are of one process or of a server.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from math import floor
from struct import Struct

from limits.storage import SlidingWindowCounterSupport, Storage

_SLOT = Struct("=QqqII")  # digest of the key, seconds of a window, its number, and two counts
_SLOTS = 16_384  # 512 KiB, of which only used pages take memory
_PROBES = 8  # slots in which one key may be


class SharedWindows(Storage, SlidingWindowCounterSupport):
    """A fixed table of counters, which processes share that are forked after its creation.

    Among more keys than it has room for, those whose windows are oldest start anew. A process that
    is killed while it counts blocks no other: the kernel drops its lock. Threads of one process
    must not use it at the same time.
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
        """Not of sliding windows. Raises NotImplementedError."""
        raise NotImplementedError("only sliding windows")

    def get(self, key: str) -> int:
        """Not of sliding windows. Raises NotImplementedError."""
        raise NotImplementedError("only sliding windows")

    def get_expiry(self, key: str) -> float:
        """Not of sliding windows. Raises NotImplementedError."""
        raise NotImplementedError("only sliding windows")

    def clear(self, key: str) -> None:
        """Not of sliding windows. Raises NotImplementedError."""
        raise NotImplementedError("only sliding windows")


def _digest(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") or 1
