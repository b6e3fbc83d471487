"""From who asks to what attends: the stored history, the session and the profile as one past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.attention.clustered.clustered_attention import MAX_ERROR
from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import Vocabulary
from models.history.attention_options import CROSSOVER, AttentionOptions, Crossover
from models.history.user_history import UserHistory
from models.ranking.explain import Reason
from service.domain.queries import Contribution, EventFilter, InlineEvent, Requester
from service.histories.event_cache import EventColumns, Histories, weights_of
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import Store, Vectors


@dataclass(frozen=True, slots=True, eq=False)
class RequestHistory:
    """A past, and what is needed to name its rows in an explanation."""

    history: UserHistory
    rows: NDArray[np.int32]  # [n] vocabulary rows of the events
    seqs: NDArray[np.integer]  # [n] the store's number of each event; 0 = inline
    types: NDArray[np.int32]  # [n] of `type_names`
    type_names: Sequence[str]
    interests: Sequence[str]  # of the profile, in the order of its rows
    version: HistoryVersion | None = None  # where this is all that is stored

    @property
    def empty(self) -> bool:
        """Whether there is nothing to attend to: no event, and nothing in the profile."""
        return not len(self.rows) and not len(self.history.profile_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the events."""
        past, types = self.history, self.history.types
        columns = (self.rows, self.seqs, self.types, past.timestamps, past.weights)
        return sum(each.nbytes for each in columns) + (0 if types is None else types.nbytes)

    @property
    def seen(self) -> NDArray[np.int64]:
        """The distinct items of the events, visible or not."""
        if not len(self.rows):
            return np.zeros(0, np.int64)
        named = np.zeros(int(self.rows.max()) + 2, np.bool_)  # the last for no item, -1
        named[self.rows] = True
        return np.flatnonzero(named[:-1])


class HistoryVersion(NamedTuple):
    """All that is stored of a user."""

    user_id: str
    version: int
    epoch: int  # of the history: see `Materialised`


# Of whom nothing is known, and who brings nothing.
NOBODY = RequestHistory(
    UserHistory.empty(), np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32), (), ()
)


def version_of(requester: Requester, stored: EventColumns | None) -> HistoryVersion | None:
    """What is asked of where that is all that is stored of a user and nothing else; else None."""
    if (
        stored is None
        or not stored.version
        or requester.history
        or requester.visible != EventFilter()
    ):
        return None
    return HistoryVersion(requester.user_id or "", stored.version, stored.epoch)


class _Columns(NamedTuple):
    rows: NDArray[np.int32]
    timestamps: NDArray[np.int64]
    weights: NDArray[np.float32]
    types: NDArray[np.int32]  # of `type_names`
    type_names: list[str]
    kinds: NDArray[np.int32]  # the same as the model's own numbers
    seqs: NDArray[np.integer]


class HistoryAssembler:
    """Makes the past of whoever asks."""

    def __init__(
        self,
        store: Store,
        histories: Histories,
        vocabulary: Vocabulary,
        embeddings: EmbeddingCache,
    ) -> None:
        self._store = store
        self._histories = histories
        self._vocabulary = vocabulary
        self._embeddings = embeddings

    async def history(self, user_id: str | None) -> EventColumns | None:
        """The stored history of whoever asks, as of now."""
        return None if user_id is None else await self._histories.get(user_id)

    def assemble(
        self, snapshot: Snapshot, requester: Requester, stored: EventColumns | None, at: int
    ) -> RequestHistory:
        """The stored events with the session's laid over them, in time order, and the profile.

        Args:
            snapshot: for the categories of items and the types of events.
            requester: who asks, and what may be seen.
            stored: from `history`.
            at: the request's time; session events without a time happened just now.
        """
        inline = requester.history or ()
        if stored is None and not inline:
            return NOBODY
        columns = self._columns(snapshot, stored, inline, at)
        rows, timestamps, weights, types, type_names, kinds, seqs = columns
        vectors = {} if stored is None else self._usable(stored.vectors)
        if inline:
            order = np.argsort(timestamps, kind="stable")
            place = np.argsort(order)
            vectors = {int(place[event]): pair for event, pair in vectors.items()}
            rows, timestamps, weights = rows[order], timestamps[order], weights[order]
            types, kinds, seqs = types[order], kinds[order], seqs[order]
        accepted = requester.visible.types
        of_types = None
        if accepted is not None:
            of_types = np.array([name in accepted for name in type_names], np.bool_)[types]
        visible = self._visible(snapshot, requester.visible, rows, timestamps, of_types)
        user = None if stored is None else stored.user  # an empty history is false
        interests = () if user is None else user.interests
        profile_rows, profile_content = self._profile(snapshot, interests)
        past = UserHistory(
            rows, timestamps, weights, visible, vectors, profile_rows, profile_content, kinds
        )
        whole = version_of(requester, stored)
        return RequestHistory(past, rows, seqs, types, type_names, interests, whole)

    async def explained(
        self,
        snapshot: Snapshot,
        user_id: str | None,
        asked: RequestHistory,
        reasons: Sequence[Sequence[Reason]],
    ) -> list[tuple[Contribution, ...]]:
        """Reasons, of some items each, with the names of what they speak of."""
        events = [reason.source for each in reasons for reason in each if reason.source >= 0]
        names = await self._event_ids(user_id, asked, events)
        return [
            tuple(self._contribution(snapshot, asked, reason, names) for reason in each)
            for each in reasons
        ]

    async def names(
        self, user_id: str, asked: RequestHistory, sources: Sequence[int]
    ) -> tuple[str, ...]:
        """What rows of a memory are called: event ids, and the interests of profile entries."""
        known = await self._event_ids(user_id, asked, [s for s in sources if s >= 0])
        return tuple(asked.interests[-1 - s] if s < 0 else known.get(s) or "" for s in sources)

    # ------------------------------------------------------------------ the parts

    async def _event_ids(
        self, user_id: str | None, asked: RequestHistory, events: Sequence[int]
    ) -> dict[int, str | None]:
        """Ids of stored events by their place in the past."""
        stored = [event for event in dict.fromkeys(events) if asked.seqs[event] > 0]
        if not stored or user_id is None:
            return {}
        ids = await self._store.event_ids(
            user_id,
            [int(asked.seqs[event]) for event in stored],
            [int(asked.history.timestamps[event]) for event in stored],
        )
        return dict(zip(stored, ids, strict=True))

    def _columns(
        self,
        snapshot: Snapshot,
        stored: EventColumns | None,
        inline: Sequence[InlineEvent],
        at: int,
    ) -> _Columns:
        """The columns of the stored events, then the inline."""
        # Names of types are few, however many events there are.
        names = [] if stored is None else list(self._histories.types.ids)
        if stored is not None and not inline:
            kinds = snapshot.type_rows(names)[stored.types]
            return _Columns(
                stored.rows,
                stored.timestamps,
                weights_of(stored),
                stored.types,
                names,
                kinds,
                stored.seqs,
            )
        # A session's names are not kept: questions must not make the process grow.
        own = list(dict.fromkeys(e.type for e in inline))
        types = np.array([len(names) + own.index(e.type) for e in inline], dtype=np.int32)
        names = names + own
        rows = np.array([self._vocabulary.row(e.item_id) for e in inline], dtype=np.int32)
        times = [at if e.timestamp is None else e.timestamp for e in inline]
        timestamps = np.array(times, dtype=np.int64)
        weights = np.array([e.weight for e in inline], dtype=np.float32)
        seqs = np.zeros(len(inline), dtype=np.int64)
        if stored is not None:
            rows = np.concatenate([stored.rows, rows])
            timestamps = np.concatenate([stored.timestamps, timestamps])
            weights = np.concatenate([weights_of(stored), weights])
            types = np.concatenate([stored.types, types])
            seqs = np.concatenate([stored.seqs.astype(np.int64), seqs])
        kinds = snapshot.type_rows(names)[types]
        return _Columns(rows, timestamps, weights, types, names, kinds, seqs)

    def _usable(self, vectors: Mapping[int, Vectors]) -> dict[int, Vectors]:
        """The events' own vectors, but those of another space than this encoder's."""
        dimension = self._embeddings.dimension
        return {
            event: pair
            for event, pair in vectors.items()
            if all(vector is None or len(vector) == dimension for vector in pair)
        }

    def _visible(
        self,
        snapshot: Snapshot,
        wanted: EventFilter,
        rows: NDArray[np.int32],
        timestamps: NDArray[np.int64],
        of_types: NDArray[np.bool_] | None,
    ) -> NDArray[np.bool_] | None:
        if wanted == EventFilter():
            return None
        visible = np.ones(len(rows), dtype=np.bool_)
        if wanted.since is not None:
            visible &= timestamps >= wanted.since
        if wanted.until is not None:
            visible &= timestamps < wanted.until
        if of_types is not None:
            visible &= of_types
        if wanted.categories is not None:
            inside = np.append(snapshot.catalogue.in_categories(wanted.categories), [False])
            visible &= inside[np.where(rows < len(snapshot.catalogue), rows, -1)]
        return visible

    def _profile(
        self, snapshot: Snapshot, interests: Sequence[str]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
        """An interest is the item of that id, where there is one, and else a category's name."""
        if not interests:
            return np.zeros(0, np.int32), None
        rows = snapshot.catalogue.rows(interests)
        for at, row in enumerate(rows.tolist()):
            if row >= 0 and not snapshot.has_vector[row]:
                rows[at] = -1
        if rows.min() >= 0:
            return rows, None
        return rows, np.stack([self._embeddings.query(word) for word in interests])

    def _contribution(
        self,
        snapshot: Snapshot,
        asked: RequestHistory,
        reason: Reason,
        names: dict[int, str | None],
    ) -> Contribution:
        numbers = (reason.weight, reason.contribution, reason.without, reason.without_exact)
        if reason.source < 0:
            word = asked.interests[-1 - reason.source]
            row = snapshot.catalogue.row(word)
            title = snapshot.catalogue.titles[row] if row >= 0 else word
            return Contribution(None, word if row >= 0 else None, title, "profile", None, *numbers)
        row = int(asked.rows[reason.source])
        titles = snapshot.catalogue.titles
        return Contribution(
            names.get(reason.source),
            self._vocabulary.id(row),
            titles[row] if row < len(titles) else "",
            asked.type_names[asked.types[reason.source]],
            int(asked.history.timestamps[reason.source]),
            *numbers,
        )


def attention_options(
    requester: Requester,
    exact_up_to: int,
    crossover: Crossover = CROSSOVER,
    max_error: float = MAX_ERROR,
) -> AttentionOptions:
    """How this requester's memory is attended."""
    retrieval = requester.retrieval
    return AttentionOptions(
        requester.temperature,
        requester.hard,
        requester.exclude_self,
        retrieval.mode,
        retrieval.k,
        retrieval.probes,
        exact_up_to,
        max_error if retrieval.max_error is None else retrieval.max_error,
        2 if retrieval.moment_order is None else retrieval.moment_order,
        crossover,
    )
