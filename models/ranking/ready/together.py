"""Items that are taken after one, or together with it, with support, lift and significance.

A basket is all that a user takes at one time. For an item a, and among the users (or baskets) with
a, those of b:

    after:   support = users with b in one of the next 20 baskets after one with a
             weight  = Σ 1 / distance², the distance counted in baskets
    basket:  support = baskets with both, which is the weight too

    lift = (support / n_a) / (n_b / n),  n_a, n_b, n being users (or baskets) with a, with b, in all

and the significance is the log-likelihood ratio G² of the two by two table of a and b (Dunning,
Accurate methods for the statistics of surprise and coincidence, 1993).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.data.event_log import LoggedEvents, log_sizes
from models.data.vocabulary import expand_ranges

Relation = Literal["after", "basket"]

MAX_DISTANCE = 20  # baskets
MIN_SUPPORT = 2
MIN_SIGNIFICANCE = 6.63  # of chi-squared with one degree of freedom: 1 % by chance
CANDIDATES = 500  # items whose significance is computed

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Companions:
    """Items taken with one item, columns [c]."""

    rows: NDArray[np.int64]
    weights: Numbers
    support: NDArray[np.int64]
    lift: Numbers
    significance: Numbers

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Companions:
        """Return some of them, by their places or a mask [c]."""
        return Companions(
            self.rows[which],
            self.weights[which],
            self.support[which],
            self.lift[which],
            self.significance[which],
        )


def companions(
    events: LoggedEvents,
    item: int,
    relation: Relation,
    *,
    groups: int,
    events_of: Callable[[int], LoggedEvents],
    allowed: NDArray[np.bool_],
) -> Companions:
    """Return the items that are taken with one more often than by chance, in no order.

    Their support is at least `MIN_SUPPORT`, their significance at least `MIN_SIGNIFICANCE`.

    Args:
        events: all events of the users that have the item.
        item: its row.
        relation: what counts as together.
        groups: the number of all users, or of all baskets.
        events_of: the events of another item.
        allowed: bool [N], the items to look at; at most `CANDIDATES` of them, with the largest
            weights.
    """
    users, items, times = events.users, events.items, events.timestamps
    order = np.lexsort((times, users))
    users, items, times = users[order], items[order], times[order]
    is_first = np.ones(len(users), np.bool_)
    is_first[1:] = (users[1:] != users[:-1]) | (times[1:] != times[:-1])
    size = int(items.max(initial=item)) + 1
    baskets, kept = np.unique((np.cumsum(is_first) - 1) * size + items, return_index=True)
    users, items, basket = users[kept], items[kept], baskets // size  # [n] of each item in each
    begins = np.flatnonzero(np.diff(basket, prepend=-1))  # [baskets]
    ends = np.append(begins[1:], len(users))
    own = np.unique(basket[items == item])  # baskets with the item
    if relation == "basket":
        first, last = begins[own], ends[own]
    else:
        # The baskets of a user lie side by side.
        final = np.searchsorted(users[begins], users[begins[own]], side="right") - 1
        reached = np.minimum(own + MAX_DISTANCE, final)
        first, last = ends[own], ends[reached]
    which, place = expand_ranges(first, last - first)
    kept = items[place] != item
    which, place = which[kept], place[kept]
    found = items[place].astype(np.int64)
    if relation == "basket":
        unit, weight = own[which], np.ones(len(place))
    else:
        unit, weight = users[place].astype(np.int64), 1.0 / (basket[place] - own[which]) ** 2
    support = np.bincount(np.unique(unit * size + found) % size, minlength=size)
    weights = np.bincount(found, weight, minlength=size).astype(np.float64)
    if relation == "basket":
        weights = support.astype(np.float64)
    rows = np.flatnonzero(support[: len(allowed)] >= MIN_SUPPORT)
    rows = rows[allowed[rows]]
    rows = rows[np.argsort(-weights[rows], kind="stable")[:CANDIDATES]]
    with_item = len(own) if relation == "basket" else len(np.unique(users[begins[own]]))
    others = np.array([count_groups(events_of(row), relation) for row in rows.tolist()], np.int64)
    expected = with_item * others / max(1, groups)
    lift: Numbers = support[rows] / np.maximum(expected, 1e-12)
    g2 = _log_likelihood_ratio(support[rows], with_item, others, groups)
    every = Companions(rows, weights[rows], support[rows], lift, g2)
    return every.take((lift > 1) & (g2 >= MIN_SIGNIFICANCE))


def count_groups(events: LoggedEvents, relation: Relation) -> int:
    """Count the users of events, or their baskets."""
    users, baskets = log_sizes(events)
    return users if relation == "after" else baskets


def _log_likelihood_ratio(
    both: NDArray[np.int64], of_a: int, of_b: NDArray[np.int64], total: int
) -> Numbers:
    """Return G² = 2 Σ k ln (k n / (row sum · column sum)) of each table, [c]."""
    cells = np.stack([both, of_a - both, of_b - both, total - of_a - of_b + both]).astype(float)
    cells = np.maximum(cells, 0.0)
    row_sums = np.stack([cells[0] + cells[1], cells[2] + cells[3]])
    column_sums = np.stack([cells[0] + cells[2], cells[1] + cells[3]])
    n = cells.sum(0)
    found: Numbers = 2 * (
        _x_log_x(cells).sum(0)
        - _x_log_x(row_sums).sum(0)
        - _x_log_x(column_sums).sum(0)
        + _x_log_x(n)
    )
    return np.maximum(found, 0.0)


def _x_log_x(numbers: Numbers) -> Numbers:
    return numbers * np.log(np.where(numbers > 0, numbers, 1.0))
