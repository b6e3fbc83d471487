"""Rows of recommendations by the item of the history that they are due to, chosen together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class BecauseRow(NamedTuple):
    """Items that one item of the history raises most."""

    cause: int  # place of that item
    targets: NDArray[np.int64]  # places of the recommended items, best first


def because_rows(
    gains: NDArray[np.float64],
    *,
    count: int,
    limit: int,
    least: int,
    choose: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
) -> list[BecauseRow]:
    """Choose rows and their causes greedily, so that no target is in two rows.

    Each step takes the cause whose `limit` largest gains, over the targets that are left, sum to
    most: what a row explains is what its cause contributes to the scores of its items.

    Args:
        gains: [T, C] what each cause contributes to the score of each target, which are in order
            of their scores; at most 0 = not a cause of it.
        count: the most rows.
        limit: the most targets of a row.
        least: the fewest.
        choose: of targets in order, at most `limit` that may be in one row; None = the first.
    """
    left = np.clip(gains, 0.0, None)
    rows: list[BecauseRow] = []
    while len(rows) < count and left.size:
        largest = -np.sort(-left, axis=0)[:limit]  # (≤ limit, C)
        sums = largest.sum(0) * ((left > 0).sum(0) >= least)
        cause = int(sums.argmax())
        if sums[cause] <= 0:
            break
        order = np.argsort(-left[:, cause], kind="stable")
        order = order[left[order, cause] > 0]
        targets = np.sort(order[:limit] if choose is None else choose(order))
        left[:, cause] = 0.0
        if len(targets) >= least:
            rows.append(BecauseRow(cause, targets))
            left[targets] = 0.0
    return rows
