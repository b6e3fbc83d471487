"""Groups of test cases: by gap to the target, by history length, by item age, and debiased."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.metrics import CaseValues, popularity_weights
from models.evaluation.splits import Holdout

_SECOND = 1_000_000  # microseconds
_DAY = 86_400 * _SECOND

# Upper bounds, inclusive; the last group has no bound.
_GAPS = {
    "0 s": 0,
    "up to 1 minute": 60 * _SECOND,
    "up to 1 hour": 3600 * _SECOND,
    "up to 1 day": _DAY,
    "over 1 day": None,
}
_LENGTHS = {"up to 10 events": 10, "up to 50": 50, "up to 200": 200, "over 200": None}
_AGES = {
    "first event later": -1,  # never in a split by time
    "up to 7 days": 7 * _DAY,
    "up to 30 days": 30 * _DAY,
    "up to 1 year": 365 * _DAY,
    "over 1 year": None,
}


class Slice(NamedTuple):
    """A weighting of the cases: a metric of the slice is sum(w * v) / sum(w)."""

    by: str  # the property of the cases
    label: str  # its values in this slice
    weights: CaseValues  # [M], 0 outside the slice

    @property
    def n_cases(self) -> int:
        """The number of cases in the slice."""
        return int(np.count_nonzero(self.weights))


def slice_cases(train: Interactions, cases: Holdout) -> list[Slice]:
    """Slice the cases of a model that was trained on `train`; slices without cases are left out.

    The gap is the time from the newest event of the history to the target, and the age of an item
    the time from its first event in training to the target. Slices of one property exclude each
    other.
    """
    counts = train.liked().item_counts()[cases.targets]
    gaps = cases.gaps()
    first = np.full(train.n_items, np.iinfo(np.int64).max)
    np.minimum.at(first, train.items, train.timestamps)
    trained = train.item_counts()[cases.targets] > 0
    ages = cases.timestamps - first[cases.targets]
    found = [
        Slice("all", "all cases", np.ones(len(cases))),
        Slice("all", "popularity-debiased", popularity_weights(counts)),
        *_bins("gap to the target", gaps, _GAPS, gaps >= 0),
        *_bins("history", cases.history.lengths[cases.users], _LENGTHS),
        *_bins("age of the item", ages, _AGES, trained),
        Slice("age of the item", "not in training", (~trained).astype(np.float64)),
    ]
    return [each for each in found if each.n_cases]


def _bins(
    by: str,
    values: NDArray[np.int64],
    bounds: dict[str, int | None],
    known: NDArray[np.bool_] | bool = True,
) -> Iterator[Slice]:
    """Cut the `known` cases by the smallest bound that is at least their value."""
    edges = [bound for bound in bounds.values() if bound is not None]
    places = np.searchsorted(edges, values)
    for place, label in enumerate(bounds):
        yield Slice(by, label, (known & (places == place)).astype(np.float64))
