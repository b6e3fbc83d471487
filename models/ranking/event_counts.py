"""Questions that the events of all users answer by counting: popular items, and items together.

Popularity is counted, decayed, against its own past, or rated. Its functions take events
(`LoggedEvents`) at most as late as the request, and return a number of each of N items; events on
items from N on are left out.

Items that are taken after one, or together with it, have a support, a lift and a significance. A
basket is all that a user takes at one time. For an item a, and among the users (or baskets) with
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
from math import log
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.columns import NEVER
from models.data.event_log import LoggedEvents, log_sizes
from models.data.vocabulary import expand_ranges

_NOISE = 1.0  # events that are added to an item's past: fewer say little
_RATING_STEPS = 100  # of the finest scale in common use, a percentage in whole numbers
_OUTLIERS = 0.01  # share of events that make up the upper half of a range, which is no scale

Numbers = NDArray[np.float64]


class PopularityScores(NamedTuple):
    """Scores of N items, with the parts that add up to them."""

    events: NDArray[np.int64]  # [N] that count
    parts: dict[str, Numbers]  # by name, [N] each

    @property
    def scores(self) -> Numbers:
        total: Numbers = np.sum(list(self.parts.values()), axis=0)
        return total


def item_counts(events: LoggedEvents, n_items: int) -> NDArray[np.int64]:
    return np.bincount(events.items, minlength=n_items)[:n_items]


def popular(
    events: LoggedEvents, n_items: int, *, at: int, half_life: int | None = None
) -> PopularityScores:
    """Sum the weights of each item's events, each times 2^-(age / half-life), in microseconds."""
    counts, weights = item_counts(events, n_items), _decayed(events, n_items, at, half_life)
    return PopularityScores(counts, {"events": weights})


def trending(
    events: LoggedEvents, n_items: int, *, at: int, half_life: int, span: int
) -> PopularityScores:
    """Compare each item's decayed count of now with what its own past predicts.

        score_c = (r_c - p_c) / √(p_c + 1)
        r_c = Σ w 2^-(age / half-life),  p_c = half-life / ln 2 · Σ w / span

    over the item's events on the last `span`. p_c is the expected r_c of an item whose events come
    evenly: the integral of the decay is half-life / ln 2. The score is the Pearson residual of a
    Poisson count, with one event added to the past as the floor of noise, as the significance score
    of SigniTrend has one (Schubert, Weiler and Kriegel, KDD 2014): few events without a past do not
    outweigh a large rise. Times are in microseconds.
    """
    recent = _decayed(events, n_items, at, half_life)
    evenly = half_life / log(2) / max(span, half_life / log(2))
    past = evenly * _decayed(events, n_items, at, None)
    noise = np.sqrt(past + _NOISE)
    return PopularityScores(
        item_counts(events, n_items), {"recent": recent / noise, "past": -past / noise}
    )


def rated(events: LoggedEvents, n_items: int) -> PopularityScores:
    """Average the weights of each item's events, shrunk to the mean of all: a Bayesian average.

        score_c = (Σ w + m μ) / (n_c + m)

    with n_c events of the item, μ the mean weight of all events and m the mean number of events of
    the items that have any, in the catalogue or not.
    """
    counts = item_counts(events, n_items)
    sums = _decayed(events, n_items, 0, None)
    every = len(events.items)
    m = every / max(1, int(np.count_nonzero(np.bincount(events.items))))
    mean = float(events.weights.sum(dtype=np.float64)) / max(1, every)
    divisor = np.maximum(counts + m, 1.0)  # 1 where there are no events at all
    return PopularityScores(counts, {"own": sums / divisor, "all": m * mean / divisor})


def unlike_ratings(events: LoggedEvents) -> Literal["equal", "values", "outliers"] | None:
    """Return why the weights of events cannot be ratings, or None where they may be.

    Ratings are on a scale of few steps, with both halves in use:

    - `equal`: all events have one weight, so that every item has the same mean.
    - `outliers`: fewer than 1 % of the events are in the upper half of the range of the weights, as
      of quantities, where a few large ones decide every mean.
    - `values`: there are more distinct weights than a percentage has steps (1 to 100), as of
      prices.
    """
    weights = events.weights
    if len(weights) < 2:  # one event is of one item
        return None
    least, most = float(weights.min()), float(weights.max())
    if least == most:
        return "equal"
    if np.count_nonzero(weights > (least + most) / 2) < _OUTLIERS * len(weights):
        return "outliers"
    # Ratings have long runs, which are sorted several times faster than `np.unique` hashes them.
    steps = int(np.count_nonzero(np.diff(np.sort(weights)))) + 1
    return "values" if steps > _RATING_STEPS else None


def appeared(catalogue: Catalogue, events: LoggedEvents) -> NDArray[np.int64]:
    """Return when each item came: published, or else its first event; `NEVER` without both, [N]."""
    first = np.full(len(catalogue), np.iinfo(np.int64).max)
    is_in = events.items < len(catalogue)
    is_in[is_in] = catalogue.published[events.items[is_in]] == NEVER
    np.minimum.at(first, events.items[is_in], events.timestamps[is_in])
    first[first == np.iinfo(np.int64).max] = NEVER
    return np.where(catalogue.published == NEVER, first, catalogue.published)


def best_rows(
    scores: NDArray[np.float64] | NDArray[np.int64],
    rows: NDArray[np.int64],
    limit: int,
    catalogue: Catalogue,
) -> NDArray[np.int64]:
    """Return the rows [≤ limit] with the highest of scores [N]; ties are in the order of ids."""
    own = scores[rows]
    if len(rows) > limit:
        least = np.partition(own, len(rows) - limit)[len(rows) - limit]
        rows = rows[own >= least]
        own = scores[rows]
    order = np.lexsort((catalogue.fields.id_ranks().ranks[rows], -own))
    return rows[order[:limit]]


def _decayed(events: LoggedEvents, n_items: int, at: int, half_life: int | None) -> Numbers:
    weights = events.weights.astype(np.float64)
    if half_life is not None:
        weights *= np.exp2((events.timestamps - at) / half_life)
    sums: Numbers = np.bincount(events.items, weights, minlength=n_items)[:n_items].astype(float)
    return sums


Relation = Literal["after", "basket"]

MAX_DISTANCE = 20  # baskets
MIN_SUPPORT = 2
MIN_SIGNIFICANCE = 6.63  # of chi-squared with one degree of freedom: 1 % by chance
CANDIDATES = 500  # items whose significance is computed


class Companions(NamedTuple):
    """Items taken with one item, columns [c]."""

    rows: NDArray[np.int64]
    weights: Numbers
    support: NDArray[np.int64]
    lift: Numbers
    significance: Numbers

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Companions:
        """Return some of them, by their places or a mask [c]."""
        return Companions._make(column[which] for column in self)


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

    Their support is at least `MIN_SUPPORT`, their significance at least `MIN_SIGNIFICANCE`. At most
    `CANDIDATES` items are looked at, those of the largest weights among the allowed [N].

    Args:
        events: all events of the users that have the item.
        groups: the number of all users, or of all baskets.
        events_of: returns the events of another item.
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
    having = np.unique(basket[items == item])  # baskets with the item
    if relation == "basket":
        first, last = begins[having], ends[having]
    else:
        # The baskets of a user lie side by side.
        final = np.searchsorted(users[begins], users[begins[having]], side="right") - 1
        reached = np.minimum(having + MAX_DISTANCE, final)
        first, last = ends[having], ends[reached]
    which, place = expand_ranges(first, last - first)
    kept = items[place] != item
    which, place = which[kept], place[kept]
    taken = items[place].astype(np.int64)
    unit = having[which] if relation == "basket" else users[place].astype(np.int64)
    support = np.bincount(np.unique(unit * size + taken) % size, minlength=size)
    if relation == "basket":
        weights = support.astype(np.float64)
    else:
        weight = 1.0 / (basket[place] - having[which]) ** 2
        weights = np.bincount(taken, weight, minlength=size).astype(np.float64)
    rows = np.flatnonzero(support[: len(allowed)] >= MIN_SUPPORT)
    rows = rows[allowed[rows]]
    rows = rows[np.argsort(-weights[rows], kind="stable")[:CANDIDATES]]
    with_item = len(having) if relation == "basket" else len(np.unique(users[begins[having]]))
    others = np.array([count_groups(events_of(row), relation) for row in rows.tolist()], np.int64)
    expected = with_item * others / max(1, groups)
    lift: Numbers = support[rows] / np.maximum(expected, 1e-12)
    g2 = _log_likelihood_ratio(support[rows], with_item, others, groups)
    every = Companions(rows, weights[rows], support[rows], lift, g2)
    return every.take((lift > 1) & (g2 >= MIN_SIGNIFICANCE))


def count_groups(events: LoggedEvents, relation: Relation) -> int:
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
    ratio: Numbers = 2 * (
        _x_log_x(cells).sum(0)
        - _x_log_x(row_sums).sum(0)
        - _x_log_x(column_sums).sum(0)
        + _x_log_x(n)
    )
    return np.maximum(ratio, 0.0)


def _x_log_x(numbers: Numbers) -> Numbers:
    return numbers * np.log(np.where(numbers > 0, numbers, 1.0))
