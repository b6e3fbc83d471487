"""User histories in memory: compact, bounded by bytes, never older than the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from models.data.vocabulary import Vocabulary
from service.domain.records import User
from service.stores.base import History, Store, Vectors

_OVERHEAD = 512  # bytes of Python objects behind one cached user, measured


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """A user's events as columns, oldest first, at one version of the store.

    20 bytes an event; weights take four more only where one differs from 1. Two of one `epoch`
    begin with the same events: the later one was appended to.
    """

    version: int
    generation: int
    rows: NDArray[np.int32]  # [n] rows of the process's vocabulary
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    seqs: NDArray[np.uint32]  # [n]
    types: NDArray[np.int32]  # [n] codes of the cache's type vocabulary
    weights: NDArray[np.float32] | None  # [n]; None = all 1
    vectors: Mapping[int, Vectors]
    user: User | None
    epoch: int

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """What keeping this costs."""
        size = self.rows.nbytes + self.timestamps.nbytes + self.seqs.nbytes + self.types.nbytes
        size += _OVERHEAD
        if self.weights is not None:
            size += self.weights.nbytes
        for pair in self.vectors.values():
            size += sum(vector.nbytes for vector in pair if vector is not None)
        return size


class Histories:
    """Cache of materialised histories, validated against the store's version at every read.

    A write that was acknowledged before a read is in what the read gets, whoever wrote it. What
    was only appended to is fetched from where the cache ends.
    """

    def __init__(self, store: Store, vocabulary: Vocabulary, max_bytes: int) -> None:
        self._store = store
        self._items = vocabulary
        self._kept: LRUCache[str, EventColumns] = LRUCache(max_bytes, attrgetter("nbytes"))
        self._epochs = count(1)
        self.types = Vocabulary()
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._kept.currsize)

    async def get(self, user_id: str) -> EventColumns:
        """The user's history as of now; empty for an unknown user."""
        version = await self._store.version(user_id)
        known = self._kept.get(user_id)
        if known is not None and known.version == version:
            self.hits += 1
            return known
        self.misses += 1
        # Whoever asks may be out of time before a very long history is read: it is kept then all
        # the same, and the next one to ask finds it.
        return await asyncio.shield(asyncio.ensure_future(self._read(user_id, known)))

    async def _read(self, user_id: str, known: EventColumns | None) -> EventColumns:
        if known is not None and len(known):
            newest = int(known.seqs.max())
            later = await self._store.history(user_id, after=newest)
            if later.generation == known.generation:
                return self._keep(user_id, self._appended(known, later))
        return self._keep(user_id, self._materialise(await self._store.history(user_id)))

    def drop(self) -> None:
        """Forget everything; no answer changes."""
        self._kept.clear()

    def _keep(self, user_id: str, history: EventColumns) -> EventColumns:
        self._kept.pop(user_id, None)
        # An unknown user costs the store nothing to ask for again.
        if history.version and history.nbytes <= self._kept.maxsize:
            self._kept[user_id] = history
        return history

    def _materialise(self, history: History) -> EventColumns:
        rows = np.array([self._items.add(id_) for id_ in history.item_ids], dtype=np.int32)
        types = np.array([self.types.add(name) for name in history.types], dtype=np.int32)
        weights = None if np.all(history.weights == 1) else history.weights
        return EventColumns(
            history.version,
            history.generation,
            rows,
            history.timestamps,
            history.seqs,
            types,
            weights,
            history.vectors,
            history.user,
            next(self._epochs),
        )

    def _appended(self, known: EventColumns, later: History) -> EventColumns:
        """Both in order of (timestamp, seq): a late arrival may belong in the middle."""
        more = self._materialise(later)
        timestamps = np.concatenate([known.timestamps, more.timestamps])
        seqs = np.concatenate([known.seqs, more.seqs])
        order: NDArray[np.int64] | slice = slice(None)
        epoch = known.epoch
        if len(more) and more.timestamps[0] < known.timestamps[-1]:
            order, epoch = np.lexsort((seqs, timestamps)), more.epoch
        place = np.empty(len(seqs), dtype=np.int64)
        place[order] = np.arange(len(seqs))
        vectors = {int(place[at]): pair for at, pair in known.vectors.items()}
        vectors |= {int(place[at + len(known)]): pair for at, pair in more.vectors.items()}
        weights = None
        if known.weights is not None or more.weights is not None:
            weights = np.concatenate([weights_of(known), weights_of(more)])[order]
        return EventColumns(
            more.version,
            more.generation,
            np.concatenate([known.rows, more.rows])[order],
            timestamps[order],
            seqs[order],
            np.concatenate([known.types, more.types])[order],
            weights,
            vectors,
            more.user,
            epoch,
        )


def weights_of(history: EventColumns) -> NDArray[np.float32]:
    """The weights of a history's events, [n]."""
    if history.weights is not None:
        return history.weights
    return np.ones(len(history), dtype=np.float32)
