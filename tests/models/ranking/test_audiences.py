"""Rows and their causes against an exhaustive greedy search."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from models.ranking.audiences import because_rows


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_the_best_that_is_left(seed: int) -> None:
    """Each row has the cause and the targets that sum to most among all subsets of what is left."""
    rng = np.random.default_rng(seed)
    gains = rng.normal(size=(9, 4)) * (rng.random((9, 4)) < 0.7)
    left, unused = set(range(9)), set(range(4))
    for row in because_rows(gains, count=3, limit=3, least=2):
        choices = [
            (sum(gains[target, cause] for target in some), cause, some)
            for cause in unused
            if sum(gains[target, cause] > 0 for target in left) >= 2
            for size in (2, 3)
            for some in combinations(sorted(left), size)
            if all(gains[target, cause] > 0 for target in some)
        ]
        _, cause, some = max(choices)
        assert (row.cause, row.targets.tolist()) == (cause, list(some))
        left -= {*some}
        unused.remove(cause)


def test_a_cause_of_too_few_targets_has_no_row() -> None:
    """Rows have at least so many targets, and there may be none."""
    gains = np.array([[5.0, 1.0], [-1.0, 1.0], [0.0, 1.0]])
    (row,) = because_rows(gains, count=9, limit=9, least=2)
    assert (row.cause, row.targets.tolist()) == (1, [0, 1, 2])
    assert because_rows(-np.abs(gains), count=9, limit=9, least=1) == []
    assert because_rows(np.zeros((0, 0)), count=9, limit=9, least=1) == []


def test_rows_are_chosen_within_what_may_stand_together() -> None:
    """A choice leaves out targets of a row, and a cause that is left with too few has none."""
    gains = np.array([[5.0, 1.0], [4.0, 3.0], [3.0, 2.0], [2.0, 0.0]])
    rows = because_rows(gains, count=9, limit=2, least=2, choose=lambda order: order[::2][:2])
    assert [(row.cause, row.targets.tolist()) for row in rows] == [(0, [0, 2])]
