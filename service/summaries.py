"""The encoder's summaries of histories that have not changed since."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from models.recommender import ItemTables
from models.snapshot import Snapshot
from models.user_memory import UserMemory, remember, summarise
from service.asking import Asked

_KEPT = 20_000  # summaries, a few hundred bytes each


class Summaries:
    """Remembers h_u, most of the cost of a small question, for whole stored histories.

    A summary depends on the events and the model's tables alone: not on the targets, nor on the
    time of the request. Any of it may be dropped at any time without changing an answer.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._tables: ItemTables | None = None
        self._summaries: OrderedDict[str, tuple[int, torch.Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._summaries)

    def remember(self, snapshot: Snapshot, asked: Asked, at: int) -> UserMemory:
        """`models.user_memory.remember`, with the summary from here where it is known."""
        if asked.whole is None:
            return remember(snapshot, asked.past, at)
        user_id, version = asked.whole
        with self._lock:
            if self._tables is not snapshot.tables:
                self._tables = snapshot.tables
                self._summaries.clear()
            known = self._summaries.get(user_id)
            if known is not None and known[0] == version:
                self._summaries.move_to_end(user_id)
        if known is not None and known[0] == version:
            return remember(snapshot, asked.past, at, summary=known[1])
        summary = summarise(snapshot, asked.past)
        with self._lock:
            if self._tables is snapshot.tables:
                self._summaries[user_id] = (version, summary)
                self._summaries.move_to_end(user_id)
                while len(self._summaries) > self._kept:
                    self._summaries.popitem(last=False)
        return remember(snapshot, asked.past, at, summary=summary)
