"""What the encoder keeps of stored histories, appended to as they grow."""

from __future__ import annotations

import threading
from contextlib import suppress
from operator import attrgetter

from cachetools import LRUCache

from models.catalogue.snapshot import Snapshot
from models.history.collapsed_history import Older
from models.history.user_memory import Encoded, UserMemory, remember
from models.recommender.recommender import Recommender
from service.histories.request_history import Asked


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
        self._kept: LRUCache[str, Encoded] = LRUCache(max_bytes, getsizeof=attrgetter("nbytes"))

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._kept.currsize)

    def remember(
        self, snapshot: Snapshot, asked: Asked, at: int, older: Older | None = None
    ) -> UserMemory:
        """`models.history.user_memory.remember`, with what the encoder did before."""
        if asked.whole is None:
            return remember(snapshot, asked.past, at)
        user_id = asked.whole.user_id
        encoded = self._get(snapshot, user_id)
        user = remember(snapshot, asked.past, at, encoded=encoded, older=older)
        if user.encoded is not None:
            self._put(snapshot, user_id, user.encoded)
        return user

    def _get(self, snapshot: Snapshot, user_id: str) -> Encoded | None:
        with self._lock:
            if self._model is not snapshot.model:
                self._model = snapshot.model
                self._kept.clear()
            return self._kept.get(user_id)

    def _put(self, snapshot: Snapshot, user_id: str, encoded: Encoded) -> None:
        with self._lock, suppress(ValueError):  # of what is larger than all that may be kept
            if self._model is snapshot.model:
                self._kept.pop(user_id, None)
                self._kept[user_id] = encoded
