"""What the encoder keeps of stored histories, appended to as they grow."""

from __future__ import annotations

import threading
from collections import OrderedDict

from models.older import Older
from models.recommender import Recommender
from models.snapshot import Snapshot
from models.user_memory import Encoded, UserMemory, remember
from service.asking import Asked


class Encodings:
    """A cache of `models.user_memory.Encoded` by user, bounded by bytes, newest use kept.

    Nothing in it need be believed: an entry tells what it was computed from, and serves a history
    only where that is a beginning of it. So any of it may be dropped at any time without changing
    an answer, and appending costs the new events alone; what merges, deletions and late events
    changed is computed anew.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._model: Recommender | None = None
        self._kept: OrderedDict[str, Encoded] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes

    def remember(
        self, snapshot: Snapshot, asked: Asked, at: int, older: Older | None = None
    ) -> UserMemory:
        """`models.user_memory.remember`, with what the encoder did before."""
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
                self._bytes = 0
            return self._kept.get(user_id)

    def _put(self, snapshot: Snapshot, user_id: str, encoded: Encoded) -> None:
        with self._lock:
            if self._model is not snapshot.model:
                return
            old = self._kept.pop(user_id, None)
            self._bytes += encoded.nbytes - (0 if old is None else old.nbytes)
            self._kept[user_id] = encoded
            while self._bytes > self._max_bytes and self._kept:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.nbytes
