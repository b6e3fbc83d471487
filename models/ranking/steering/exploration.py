"""Exploration of items with few events by Thompson sampling (Thompson 1933).

An item's appeal is taken for normal around its score, with the standard deviation

    σ / √(1 + n),        σ of the scores that are compared, n the events on the item

A draw of all appeals shows the items of the largest. The propensity of an item is the share of
`DRAWS` draws that show it. One of these, the first, is the one that is carried out, so that no
item is shown with a propensity of zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.ranking.steering.quota_counts import QuotaCounts

DRAWS = 500
EXPLORED = 200  # items at most that a draw is between


def explore(
    scores: NDArray[np.float32],
    events: NDArray[np.int64],
    order: NDArray[np.int64],
    counts: QuotaCounts,
    limit: int,
    generator: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw items and take them from the open ones.

    Args:
        scores: [P] of a pool.
        events: [P] number of events on each item.
        order: places of the items to draw from, best first.
        counts: of the pool.
        limit: the most items.
        generator: of the draws.

    Returns:
        Places [≤ limit] in the order of the draw, and their propensities.
    """
    order = order[counts.open[order]][: max(EXPLORED, 4 * limit)]
    if limit <= 0 or not len(order):
        return order[:0], np.zeros(0, np.float32)
    deviation = scores.std() / np.sqrt(1 + events[order])
    noise = generator.standard_normal((DRAWS, len(order)), np.float32)
    appeal = scores[order] + deviation * noise
    shown = np.zeros(len(order))
    first: list[int] = []
    most = min(limit, len(order))
    if counts.constrains:
        for draw in range(DRAWS):
            chosen = _draw(appeal[draw], order, counts.copy(), limit)
            shown[chosen] += 1
            first = first or chosen
    else:
        top = np.argpartition(-appeal, most - 1, axis=1)[:, :most]
        shown += np.bincount(top.ravel(), minlength=len(order))
        first = np.argsort(-appeal[0], kind="stable")[:most].tolist()
    for at in first:
        counts.take(int(order[at]))
    return order[first], (shown[first] / DRAWS).astype(np.float32)


def _draw(
    appeal: NDArray[np.float32], order: NDArray[np.int64], counts: QuotaCounts, limit: int
) -> list[int]:
    """Return the items of the largest appeal that quotas let in, as places of `order`."""
    chosen = list[int]()
    for at in np.argsort(-appeal, kind="stable").tolist():
        if counts.open[order[at]]:
            counts.take(int(order[at]))
            chosen.append(at)
            if len(chosen) == limit:
                break
    return chosen
