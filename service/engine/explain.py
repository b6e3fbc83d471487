"""Reasons of the scores of an answer's items."""

from __future__ import annotations

from collections.abc import Sequence

from models.catalogue.snapshot import Snapshot
from models.history.attention_options import AttentionOptions
from models.history.user_memory import UserMemory
from models.ranking.explain import Reason, explain
from models.ranking.leave_one_out import scores_without
from models.ranking.scoring import Scores
from service.domain.queries import Requester
from service.engine.score import ItemRows


def explain_items(
    snapshot: Snapshot,
    user: UserMemory,
    rows: ItemRows,
    scores: Scores,
    *,
    options: AttentionOptions,
    requester: Requester,
    places: Sequence[int] | None = None,
) -> list[list[Reason]]:
    """Explain the scores of items by the events that contribute most; [] without `explain`.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        rows: item rows [L].
        scores: of these rows, or of more.
        options: as the scores were made.
        requester: says how many reasons of each item, and how exact.
        places: [L] of the rows among the scores, -1 = not scored, which has no reasons; by default
            in order.
    """
    if not requester.explain:
        return []
    rest = (scores.sequence + scores.prior).tolist()
    where = range(len(rows)) if places is None else places
    reasons = [
        []
        if place < 0
        else explain(
            snapshot,
            user,
            row,
            requester.explain,
            options,
            other_parts=rest[place],
            partial=None if scores.partial is None else scores.partial.target(place),
        )
        for row, place in zip(rows.tolist(), where, strict=True)
    ]
    if not requester.explain_exact:
        return reasons
    return _with_exact_scores(snapshot, user, rows, reasons, options)


def _with_exact_scores(
    snapshot: Snapshot,
    user: UserMemory,
    rows: ItemRows,
    reasons: Sequence[Sequence[Reason]],
    options: AttentionOptions,
) -> list[list[Reason]]:
    """Add to the reasons of items, rows [L], the scores had their events never happened.

    An event that moved several items is left out once, and then scores all of them.
    """
    moved: dict[int, list[int]] = {}
    # The encoder reads none of the older events, so that `without` is all that they change.
    older = 0 if user.collapsed is None else user.collapsed.count
    for row, each in zip(rows.tolist(), reasons, strict=True):
        for reason in each:
            if not 0 <= reason.source < older:
                moved.setdefault(reason.source, []).append(row)
    scores = scores_without(snapshot, user, moved, options)
    return [
        [
            reason._replace(without_exact=scores.get((reason.source, row), reason.without))
            for reason in each
        ]
        for row, each in zip(rows.tolist(), reasons, strict=True)
    ]
