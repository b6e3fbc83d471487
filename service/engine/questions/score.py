"""The rows that are scored, and the answer to a request for scores or recommendations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.ranking.scoring import Scores
from service.domain.errors import NotFound
from service.domain.queries import Answer, AnswerItem, Contribution, Requester

ItemRows = NDArray[np.int32] | NDArray[np.int64]


def item_row(snapshot: Snapshot, item_id: str) -> int:
    """Return the row of an item that can be scored. Raises `NotFound`."""
    rows = snapshot.catalogue.rows([item_id])
    if not snapshot.is_scorable(rows).all():
        raise NotFound(f"no item {item_id!r} in the catalogue")
    return int(rows[0])


def score_answer(
    requester: Requester,
    snapshot: Snapshot,
    rows: ItemRows,
    scores: Scores,
    explanations: Sequence[tuple[Contribution, ...]],
) -> Answer:
    """Make the answer of item rows [L] with their scores, part by part.

    There are no explanations where the requester wants none.
    """
    catalogue = snapshot.catalogue
    reason = snapshot.memory_reason if scores.memory_rows else "popular"
    parts = scores.parts
    values = zip(*(part.tolist() for part in parts.values()), strict=True)
    columns = zip(
        catalogue.vocabulary.ids_of(rows.tolist()),
        scores.total.tolist(),
        catalogue.titles.take(rows),
        map(dict, map(zip, repeat(tuple(parts)), values)),
        scores.mass.tolist(),
        strict=True,
    )
    items: list[AnswerItem] = [
        {
            "item_id": item_id,
            "score": total,
            "title": title,
            "parts": by_name,
            "reason": reason,
            "mass": mass,
        }
        for item_id, total, title, by_name, mass in columns
    ]
    if requester.explain:
        for item, explanation in zip(items, explanations, strict=True):
            item["explanation"] = explanation
    if scores.relative_error is not None:
        for item, error in zip(items, scores.relative_error.tolist(), strict=True):
            item["relative_error"] = error
    rows_scanned = None if scores.rows_scanned is None else round(scores.rows_scanned)
    return Answer(items, snapshot.version, scores.mode, rows_scanned=rows_scanned)
