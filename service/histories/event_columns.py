"""A user's events as columns: read from a store, merged with a session, made for one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import Vocabulary
from models.history.user_history import UserHistory, select_vectors
from service.domain.records import User
from service.questions.asked import InlineEventIn
from service.questions.parts import ALL_EVENTS, VisibleIn
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import Store
from service.stores.values import EventVectors, History

_OVERHEAD = 512  # bytes of Python objects behind one user's columns, measured


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """A user's events, oldest first by (timestamp, seq), at one version of the store.

    20 bytes an event; weights take four more only where one differs from 1. Later columns of an
    `epoch` begin with the events of earlier ones. The `epoch` is the process's own: it is new where
    the store's `generation` is, and also where an event arrived out of order or the columns were
    read again.
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

    def select(self, events: NDArray[np.int64] | slice) -> EventColumns:
        """Keep some events, in the order of their positions here."""
        return replace(
            self,
            rows=self.rows[events],
            timestamps=self.timestamps[events],
            seqs=self.seqs[events],
            types=self.types[events],
            weights=None if self.weights is None else self.weights[events],
            vectors=select_vectors(self.vectors, np.arange(len(self))[events]),
        )

    def filled_weights(self) -> NDArray[np.float32]:
        return np.ones(len(self), np.float32) if self.weights is None else self.weights


# The columns of every requester without events and interests.
EMPTY = EventColumns(
    user_id="",
    version=0,
    generation=0,
    epoch=0,
    rows=np.zeros(0, np.int32),
    timestamps=np.zeros(0, np.int64),
    seqs=np.zeros(0, np.int32),
    types=np.zeros(0, np.int32),
    type_names=(),
    weights=None,
    vectors={},
    user=None,
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

        If nothing has changed since `known`, it is returned itself.
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
            user_id=history.user_id,
            version=history.version,
            generation=history.generation,
            epoch=next(self._epochs),
            rows=np.array([self._items.add(id_) for id_ in history.item_ids], dtype=np.int32),
            timestamps=history.timestamps,
            seqs=history.seqs,
            types=np.array([self._types.add(name) for name in history.types], dtype=np.int32),
            type_names=self._types.ids,
            weights=None if np.all(history.weights == 1) else history.weights,
            vectors=history.vectors,
            user=history.user,
        )


def _appended(known: EventColumns, more: EventColumns) -> EventColumns:
    """Merge columns in the order of (timestamp, seq): a late arrival may belong in the middle."""
    merged = concat(known, more)
    if len(more) and more.timestamps[0] < known.timestamps[-1]:
        return merged.select(np.lexsort((merged.seqs, merged.timestamps)))
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
    return replace(events.select(slice(count)), version=0)


def with_session(
    stored: EventColumns, session: Sequence[InlineEventIn], at: int, vocabulary: Vocabulary
) -> EventColumns:
    """Merge the events of a session into the stored ones, in time order.

    Session events without a time happened at the request's, `at`; items have their rows in the
    vocabulary.
    """
    # Not added to the vocabularies: requests must not make the process grow.
    added = list(dict.fromkeys(event.type for event in session))
    known = list(stored.type_names)
    rows = [vocabulary.row(event.item_id) for event in session]
    times = [at if event.timestamp is None else event.timestamp for event in session]
    inline = replace(
        stored,
        version=0,
        rows=np.array(rows, np.int32),
        timestamps=np.array(times, np.int64),
        seqs=np.zeros(len(session), np.int64),
        types=np.array([len(known) + added.index(event.type) for event in session], np.int32),
        type_names=known + added,
        weights=np.array([event.weight for event in session], np.float32),
        vectors={},
    )
    merged = concat(stored, inline)
    return merged.select(np.argsort(merged.timestamps, kind="stable"))


def assemble_history(
    snapshot: Snapshot, events: EventColumns, visible: VisibleIn, embeddings: EmbeddingCache
) -> UserHistory:
    """Assemble what a request attends to: of the events, those that are visible."""
    if events is EMPTY:
        return UserHistory.empty()
    profile_rows, profile_content = _profile(snapshot, events.interests, embeddings)
    dimension = embeddings.encoder.dimension
    usable = {
        event: pair
        for event, pair in events.vectors.items()
        if all(vector is None or len(vector) == dimension for vector in pair)
    }
    return UserHistory(
        rows=events.rows,
        timestamps=events.timestamps,
        weights=events.filled_weights(),
        # Names of types are few, however many events there are.
        types=snapshot.type_rows(events.type_names)[events.types],
        visible=visible_events(snapshot, events, visible),
        vectors=usable,
        profile_rows=profile_rows,
        profile_content=profile_content,
    )


def _profile(
    snapshot: Snapshot, interests: Sequence[str], embeddings: EmbeddingCache
) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
    """Item rows [p] and content [p, D]: an interest is the item of that id, or else a text."""
    if not interests:
        return np.zeros(0, np.int32), None
    rows = snapshot.catalogue.rows(interests)
    for at, row in enumerate(rows.tolist()):
        if row >= 0 and not snapshot.has_vector[row]:
            rows[at] = -1
    if rows.min() >= 0:
        return rows, None
    return rows, np.stack([embeddings.query(text) for text in interests])


def visible_events(
    snapshot: Snapshot, events: EventColumns, wanted: VisibleIn
) -> NDArray[np.bool_] | None:
    """Which events [n] meet the conditions; None = all."""
    if wanted == ALL_EVENTS:
        return None
    visible = np.ones(len(events), np.bool_)
    if wanted.since is not None:
        visible &= events.timestamps >= wanted.since
    if wanted.until is not None:
        visible &= events.timestamps < wanted.until
    if wanted.types is not None:
        accepted = [name in wanted.types for name in events.type_names]
        visible &= np.array(accepted, np.bool_)[events.types]
    if wanted.categories is not None:
        inside = np.append(snapshot.catalogue.in_categories(wanted.categories), [False])
        visible &= inside[np.where(events.rows < len(snapshot.catalogue), events.rows, -1)]
    return visible
