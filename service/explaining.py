"""Why the items of an answer have their scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.explain import Reason, explain
from models.scoring import Attending, Scores
from models.snapshot import Snapshot
from models.user_memory import UserMemory


def reasons_of(
    snapshot: Snapshot,
    user: UserMemory,
    rows: NDArray[np.int32] | NDArray[np.int64],
    scores: Scores,
    *,
    how: Attending,
    top: int,
    places: Sequence[int] | None = None,
) -> list[list[Reason]]:
    """The `top` reasons of each of some items; no lists at all where none were asked for.

    Args:
        snapshot: the model and the catalogue.
        user: from `remember` with the same snapshot.
        rows: item rows [L].
        scores: of these rows, or of more.
        how: as the scores were made.
        top: how many reasons of each.
        places: [L] of the rows among the scores, -1 = not scored, which has no reasons; in order
            if left out.
    """
    if not top:
        return []
    rest = (scores.sequence + scores.prior).tolist()
    where = range(len(rows)) if places is None else places
    return [
        []
        if place < 0
        else explain(
            snapshot,
            user,
            row,
            top,
            how,
            rest=rest[place],
            within=None if scores.within is None else scores.within[place],
        )
        for row, place in zip(rows.tolist(), where, strict=True)
    ]
