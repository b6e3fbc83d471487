"""The rows that are scored, and the answer to a request for scores or recommendations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.ranking.scoring import Scores
from service.domain.errors import NotFound
from service.domain.queries import Answer, AnswerItem, Contribution, Requester
from service.engine.explanation.naming import remainder_of

ItemRows = NDArray[np.int32] | NDArray[np.int64]


def item_row(snapshot: Snapshot, item_id: str) -> int:
    """Return the row of an item that can be asked about. Raises `NotFound`."""
    rows = snapshot.catalogue.rows([item_id])
    if not snapshot.is_known(rows).all():
        raise NotFound(f"no item {item_id!r} in the catalogue")
    return int(rows[0])


def score_answer(
    requester: Requester,
    snapshot: Snapshot,
    rows: ItemRows,
    scores: Scores,
    explanations: Sequence[tuple[Contribution, ...]],
    *,
    degraded: bool = False,
) -> Answer:
    """Make the answer of item rows [L] with their scores, part by part.

    There are no explanations where the requester wants none. `degraded` says that not everything
    the store has may be known.
    """
    catalogue = snapshot.catalogue
    reason = snapshot.memory_reason if scores.memory_rows else "popular"
    columns = zip(
        catalogue.vocabulary.ids_of(rows.tolist()),
        scores.total.tolist(),
        catalogue.titles.take(rows),
        _parts(scores),
        scores.mass.tolist(),
        strict=True,
    )
    items: list[AnswerItem] = [
        {
            "item_id": item_id,
            "score": total,
            "title": title,
            "parts": parts,
            "reason": reason,
            "mass": mass,
        }
        for item_id, total, title, parts, mass in columns
    ]
    if requester.explain:
        personal, count = scores.personal.tolist(), scores.memory_rows
        for item, explanation, whole in zip(items, explanations, personal, strict=True):
            item["explanation"] = explanation
            item["remainder"] = remainder_of(explanation, whole, count)
    if scores.relative_error is not None:
        for item, error in zip(items, scores.relative_error.tolist(), strict=True):
            item["relative_error"] = error
    return Answer(
        items,
        snapshot.version,
        scores.mode,
        rows_scanned=round(scores.rows_scanned),
        memory_rows=scores.memory_rows,
        degraded=degraded,
    )


def _parts(scores: Scores) -> list[dict[str, float]]:
    """Return the parts of each score by name: as `Scores.parts`, with a literal for most of them.

    To make dictionaries of names and values takes three times as long.
    """
    parts = scores.parts
    attention, transitions, prior = (
        parts.pop(name).tolist() for name in ("attention", "transitions", "prior")
    )
    similarity = parts.pop("similarity", None)
    if similarity is None:
        found = [
            {"attention": a, "transitions": t, "prior": p}
            for a, t, p in zip(attention, transitions, prior, strict=True)
        ]
    else:
        found = [
            {"attention": a, "transitions": t, "similarity": s, "prior": p}
            for a, t, s, p in zip(attention, transitions, similarity.tolist(), prior, strict=True)
        ]
    for name, part in parts.items():
        for by_name, value in zip(found, part.tolist(), strict=True):
            by_name[name] = value
    return found
