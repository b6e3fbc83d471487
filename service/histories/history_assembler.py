"""From stored columns and a session to what one request attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import Vocabulary
from models.history.user_history import UserHistory
from service.domain.queries import EventFilter, InlineEvent
from service.histories.event_columns import EMPTY, EventColumns, concat, reorder
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import EventVectors


class HistoryAssembler:
    """Assembles histories.

    Args:
        vocabulary: gives items their rows.
        embeddings: encodes interests, and says how long the events' own vectors must be.
    """

    def __init__(self, vocabulary: Vocabulary, embeddings: EmbeddingCache) -> None:
        self._vocabulary = vocabulary
        self._embeddings = embeddings

    def with_session(
        self, stored: EventColumns, session: Sequence[InlineEvent], at: int
    ) -> EventColumns:
        """Merge the events of a session into the stored ones, in time order.

        Session events without a time happened at the request's, `at`.
        """
        # Not added to the vocabularies: requests must not make the process grow.
        own = list(dict.fromkeys(event.type for event in session))
        known = list(stored.type_names)
        rows = [self._vocabulary.row(event.item_id) for event in session]
        times = [at if event.timestamp is None else event.timestamp for event in session]
        inline = replace(
            stored,
            version=0,
            rows=np.array(rows, np.int32),
            timestamps=np.array(times, np.int64),
            seqs=np.zeros(len(session), np.int64),
            types=np.array([len(known) + own.index(event.type) for event in session], np.int32),
            type_names=known + own,
            weights=np.array([event.weight for event in session], np.float32),
            vectors={},
        )
        merged = concat(stored, inline)
        return reorder(merged, np.argsort(merged.timestamps, kind="stable"))

    def history(
        self, snapshot: Snapshot, events: EventColumns, visible: EventFilter
    ) -> UserHistory:
        """Assemble what a request attends to: of the events, those that are visible."""
        if events is EMPTY:
            return UserHistory.empty()
        profile_rows, profile_content = self._profile(snapshot, events.interests)
        return UserHistory(
            events.rows,
            events.timestamps,
            events.filled_weights(),
            # Names of types are few, however many events there are.
            snapshot.type_rows(events.type_names)[events.types],
            _visible(snapshot, events, visible),
            self._usable(events.vectors),
            profile_rows,
            profile_content,
        )

    def _usable(self, vectors: Mapping[int, EventVectors]) -> dict[int, EventVectors]:
        """The events' own vectors, without those of another dimension than this encoder's."""
        dimension = self._embeddings.encoder.dimension
        return {
            event: pair
            for event, pair in vectors.items()
            if all(vector is None or len(vector) == dimension for vector in pair)
        }

    def _profile(
        self, snapshot: Snapshot, interests: Sequence[str]
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
        return rows, np.stack([self._embeddings.query(text) for text in interests])


def _visible(
    snapshot: Snapshot, events: EventColumns, wanted: EventFilter
) -> NDArray[np.bool_] | None:
    """Which events [n] meet the conditions; None = all."""
    if wanted == EventFilter():
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
