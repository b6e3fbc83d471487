"""Memories of stored histories as they were asked for last, for as long as they would be the same.

Time enters a memory through buckets of ages alone (`models.encoder.recency_bias`). So a memory
that was made for one time is that of every other at which no event's age has gone to another
bucket.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from cachetools import LRUCache

from models.catalogue.snapshot import Snapshot
from models.encoder.recency_bias import steady
from models.history.user_memory import UserMemory
from service.histories.request_history import HistoryVersion, RequestHistory


class Remembered:
    """A cache of `UserMemory` by user, bounded by bytes, newest use kept.

    Any of it may be dropped at any time without changing an answer.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._kept: LRUCache[str, _Kept] = LRUCache(max_bytes, getsizeof=lambda kept: kept.nbytes)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._kept.currsize)

    def get(self, snapshot: Snapshot, asked: RequestHistory, at: int) -> UserMemory | None:
        """The memory of these very events at a time, microseconds UTC, where it is known."""
        kept = self._of(snapshot, asked.version)
        return kept.user if kept is not None and kept.since <= at < kept.until else None

    def asked(self, snapshot: Snapshot, whole: HistoryVersion | None) -> RequestHistory | None:
        """What these very events were put together to, where a memory of them is known."""
        kept = self._of(snapshot, whole)
        return None if kept is None else kept.asked

    def put(self, snapshot: Snapshot, asked: RequestHistory, user: UserMemory) -> None:
        """Keep what `models.history.user_memory.remember` made of all that is stored of a user."""
        whole = asked.version
        size = user.nbytes + asked.nbytes
        if whole is None or size > self._kept.maxsize:
            return
        younger, older = steady(user.at - asked.history.timestamps)
        kept = _Kept(user, asked, size, user.at - younger, user.at + older)
        with self._lock:
            if self._snapshot is snapshot:
                self._kept.pop(whole.user_id, None)
                self._kept[whole.user_id] = kept

    def _of(self, snapshot: Snapshot, whole: HistoryVersion | None) -> _Kept | None:
        if whole is None:
            return None
        with self._lock:
            if self._snapshot is not snapshot:
                self._snapshot = snapshot
                self._kept.clear()
                return None
            kept = self._kept.get(whole.user_id)
            return kept if kept is not None and kept.asked.version == whole else None


class _Kept(NamedTuple):
    user: UserMemory
    asked: RequestHistory
    nbytes: int
    since: int  # microseconds UTC: from then on
    until: int  # and before then, it is the same
