"""The stored events of one user as columns, and how they are read from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray

from models.data.vocabulary import Vocabulary
from service.domain.records import User
from service.stores.base import Store
from service.stores.values import EventVectors, History

_OVERHEAD = 512  # bytes of Python objects behind one user's columns, measured


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """A user's events, oldest first by (timestamp, seq), at one version of the store.

    20 bytes an event; weights take four more only where one differs from 1. Of two columns of one
    `epoch`, the later begins with the events of the earlier. The `epoch` is the process's own: it
    is new where the store's `generation` is, and also where an event arrived out of order or the
    columns were read anew.
    """

    user_id: str
    version: int  # of the user in the store; 0 = not what the store has of a user, or not only
    generation: int
    epoch: int
    rows: NDArray[np.int32]  # [n] rows of the process's vocabulary, -1 = an item it does not know
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    seqs: NDArray[np.integer]  # [n] the store's number of each event; 0 = of a session
    types: NDArray[np.int32]  # [n] codes of `type_names`
    type_names: Sequence[str]  # may be longer than the types in use
    weights: NDArray[np.float32] | None  # [n]; None = all 1
    vectors: Mapping[int, EventVectors]  # by event; only events that brought any
    user: User | None  # the profile
    is_stale: bool = False  # the store did not answer: it may have more by now

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        columns = (self.rows, self.timestamps, self.seqs, self.types, self.weights)
        arrays = chain(columns, *self.vectors.values())
        return _OVERHEAD + sum(array.nbytes for array in arrays if array is not None)

    @property
    def interests(self) -> tuple[str, ...]:
        """Interests of the profile, in the order of its memory rows."""
        return () if self.user is None else self.user.interests

    @property
    def items(self) -> NDArray[np.int64]:
        """Rows of the distinct items, ascending."""
        if not len(self.rows):
            return np.zeros(0, np.int64)
        present = np.zeros(int(self.rows.max()) + 2, np.bool_)  # the last for no item, -1
        present[self.rows] = True
        return np.flatnonzero(present[:-1])

    def filled_weights(self) -> NDArray[np.float32]:
        """The weight of each event, [n]."""
        return np.ones(len(self), np.float32) if self.weights is None else self.weights


def _int32() -> NDArray[np.int32]:
    return np.zeros(0, np.int32)


# The columns of every requester without events and interests.
EMPTY = EventColumns(
    "", 0, 0, 0, _int32(), np.zeros(0, np.int64), _int32(), _int32(), (), None, {}, None
)


class EventReader:
    """Reads users' events from a store into columns, and adds unknown ids to the `items`."""

    def __init__(self, store: Store, items: Vocabulary) -> None:
        self._store = store
        self._items = items
        self._types = Vocabulary()
        self._epochs = count(1)

    async def read(self, user_id: str, known: EventColumns | None = None) -> EventColumns:
        """Read all events of a user, or those after `known` where they were only appended to.

        Where nothing has changed since `known`, it is returned itself.
        """
        if known is None:
            return self._columns(await self._store.history(user_id))
        changed = await self._store.changed_history(
            user_id,
            version=known.version,
            generation=known.generation,
            seq=int(known.seqs.max()) if len(known) else 0,
        )
        if changed is None:
            return known
        columns = self._columns(changed)
        if len(known) and changed.generation == known.generation:
            return _appended(known, columns)
        return columns

    def _columns(self, history: History) -> EventColumns:
        return EventColumns(
            history.user_id,
            history.version,
            history.generation,
            next(self._epochs),
            np.array([self._items.add(id_) for id_ in history.item_ids], dtype=np.int32),
            history.timestamps,
            history.seqs,
            np.array([self._types.add(name) for name in history.types], dtype=np.int32),
            self._types.ids,
            None if np.all(history.weights == 1) else history.weights,
            history.vectors,
            history.user,
        )


def _appended(known: EventColumns, more: EventColumns) -> EventColumns:
    """Merge columns in the order of (timestamp, seq): a late arrival may belong in the middle."""
    merged = concat(known, more)
    if len(more) and more.timestamps[0] < known.timestamps[-1]:
        return reorder(merged, np.lexsort((merged.seqs, merged.timestamps)))
    return replace(merged, epoch=known.epoch)


def concat(first: EventColumns, second: EventColumns) -> EventColumns:
    """Put the events of `second` after those of `first`; all else is of `second`."""
    weights = None
    if first.weights is not None or second.weights is not None:
        weights = np.concatenate([first.filled_weights(), second.filled_weights()])
    later = {len(first) + at: pair for at, pair in second.vectors.items()}
    return replace(
        second,
        rows=np.concatenate([first.rows, second.rows]),
        timestamps=np.concatenate([first.timestamps, second.timestamps]),
        seqs=np.concatenate([first.seqs, second.seqs]),
        types=np.concatenate([first.types, second.types]),
        weights=weights,
        vectors={**first.vectors, **later},
    )


def up_to(events: EventColumns, at: int) -> EventColumns:
    """Leave out the events after a time, microseconds UTC, as if they had never happened."""
    count = int(np.searchsorted(events.timestamps, at, side="right"))
    if count == len(events):
        return events  # with its version: what is cached of it serves
    return replace(
        events,
        version=0,
        rows=events.rows[:count],
        timestamps=events.timestamps[:count],
        seqs=events.seqs[:count],
        types=events.types[:count],
        weights=None if events.weights is None else events.weights[:count],
        vectors={event: pair for event, pair in events.vectors.items() if event < count},
    )


def reorder(events: EventColumns, order: NDArray[np.int64]) -> EventColumns:
    """Put events into another order, [n]."""
    place = np.empty(len(events), np.int64)
    place[order] = np.arange(len(events))
    return replace(
        events,
        rows=events.rows[order],
        timestamps=events.timestamps[order],
        seqs=events.seqs[order],
        types=events.types[order],
        weights=None if events.weights is None else events.weights[order],
        vectors={int(place[at]): pair for at, pair in events.vectors.items()},
    )
