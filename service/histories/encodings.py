"""What the encoder keeps of stored histories, appended to as they grow."""

from __future__ import annotations

import threading
from contextlib import suppress
from operator import attrgetter

from cachetools import LRUCache

from models.catalogue.snapshot import Snapshot
from models.history.collapsed_history import CollapsedHistory
from models.history.user_memory import EncodedHistory, UserMemory, build_memory
from models.recommender.recommender import Recommender
from service.histories.request_history import RequestHistory


class Encodings:
    """A cache of `models.history.user_memory.Encoded` by user, bounded by bytes, newest use kept.

    Nothing in it need be believed: an entry tells what it was computed from, and serves a history
    only where that is a beginning of it. So any of it may be dropped at any time without changing
    an answer, and appending costs the new events alone; what merges, deletions and late events
    changed is computed anew.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._model: Recommender | None = None
        self._kept: LRUCache[str, EncodedHistory] = LRUCache(
            max_bytes, getsizeof=attrgetter("nbytes")
        )

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._kept.currsize)

    def remember(
        self,
        snapshot: Snapshot,
        asked: RequestHistory,
        at: int,
        collapsed: CollapsedHistory | None = None,
    ) -> UserMemory:
        """`models.history.user_memory.remember`, with what the encoder did before."""
        if asked.version is None:
            return build_memory(snapshot, asked.history, at)
        user_id = asked.version.user_id
        encoded = self._get(snapshot, user_id)
        user = build_memory(snapshot, asked.history, at, encoded=encoded, collapsed=collapsed)
        if user.encoded is not None:
            self._put(snapshot, user_id, user.encoded)
        return user

    def _get(self, snapshot: Snapshot, user_id: str) -> EncodedHistory | None:
        with self._lock:
            if self._model is not snapshot.model:
                self._model = snapshot.model
                self._kept.clear()
            return self._kept.get(user_id)

    def _put(self, snapshot: Snapshot, user_id: str, encoded: EncodedHistory) -> None:
        with self._lock, suppress(ValueError):  # of what is larger than all that may be kept
            if self._model is snapshot.model:
                self._kept.pop(user_id, None)
                self._kept[user_id] = encoded
