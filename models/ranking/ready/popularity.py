"""Popularity of items by their events: counted, decayed, against their own past, or rated.

Every function takes events (`LoggedEvents`) at most as late as the request, and returns a number of
each of N items; events on items from N on are left out.
"""

from __future__ import annotations

from math import log
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.fields.field_columns import NEVER
from models.data.event_log import LoggedEvents

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
        """The sum of the parts, [N]."""
        total: Numbers = np.sum(list(self.parts.values()), axis=0)
        return total


def item_counts(events: LoggedEvents, n_items: int) -> NDArray[np.int64]:
    """Count the events of each item, [N]."""
    return np.bincount(events.items, minlength=n_items)[:n_items]


def popular(
    events: LoggedEvents, n_items: int, *, at: int, half_life: int | None = None
) -> PopularityScores:
    """Sum the weights of each item's events, each times 2^-(age / half-life).

    Args:
        events: that count.
        n_items: N.
        at: the time of the request, microseconds UTC.
        half_life: in microseconds; None = no decay.
    """
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
    outweigh a large rise.

    Args:
        events: of the last `span`.
        n_items: N.
        at: the time of the request, microseconds UTC.
        half_life: of the count of now, in microseconds.
        span: how far the past goes, in microseconds.
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

    Ratings are on a scale of few steps, both halves of which are in use:

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
