"""From stored columns and a session to what one request attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import Vocabulary
from models.history.user_history import UserHistory
from service.histories.event_columns import EMPTY, EventColumns, concat, reorder
from service.questions.asked import InlineEventIn
from service.questions.parts import ALL_EVENTS, VisibleIn
from service.snapshots.text_embeddings import EmbeddingCache


def with_session(
    stored: EventColumns, session: Sequence[InlineEventIn], at: int, vocabulary: Vocabulary
) -> EventColumns:
    """Merge the events of a session into the stored ones, in time order.

    Session events without a time happened at the request's, `at`; items have their rows in the
    vocabulary.
    """
    # Not added to the vocabularies: requests must not make the process grow.
    own = list(dict.fromkeys(event.type for event in session))
    known = list(stored.type_names)
    rows = [vocabulary.row(event.item_id) for event in session]
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
        events.rows,
        events.timestamps,
        events.filled_weights(),
        # Names of types are few, however many events there are.
        snapshot.type_rows(events.type_names)[events.types],
        visible_events(snapshot, events, visible),
        usable,
        profile_rows,
        profile_content,
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
