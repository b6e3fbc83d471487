"""Slices of cases, with their bounds worked out by hand."""

from __future__ import annotations

import numpy as np

from models.data.interactions import Interactions
from models.evaluation.splits import Holdout
from service.lab.protocols import Slice, slice_cases
from tests.support.small import DAY, SECOND

# The five users' newest events, and how long after them their targets follow.
NEWEST = 400 * DAY
GAPS = [0, 60 * SECOND, 60 * SECOND + 1, DAY, DAY + 1]
TARGETS = [0, 0, 1, 2, 3]
LENGTHS = [10, 11, 50, 200, 201]


def sliced() -> dict[tuple[str, str], Slice]:
    """The slices of five cases: items 0 to 2 trained from day 0, 370 and 500 on, item 3 never."""
    users = np.repeat(np.arange(5), LENGTHS)
    history = Interactions.from_columns(
        users, np.zeros(len(users), int), np.full(len(users), NEWEST), n_users=5, n_items=4
    )
    cases = Holdout(
        np.arange(5, dtype=np.int32),
        np.array(TARGETS, dtype=np.int32),
        np.array(GAPS, dtype=np.int64) + NEWEST,
        history,
    )
    train = Interactions.from_columns(
        [0, 1, 0, 1, 2], [0, 0, 1, 0, 2], np.array([5, 0, 370, 9, 500]) * DAY, n_users=5, n_items=4
    )
    return {(each.by, each.label): each for each in slice_cases(train, cases)}


def test_slices_by_hand() -> None:
    """Bounds belong to the slice below them; slices without cases are left out."""
    found = {name: np.flatnonzero(each.weights).tolist() for name, each in sliced().items()}
    assert found == {
        ("all", "all cases"): [0, 1, 2, 3, 4],
        ("all", "popularity-debiased"): [0, 1, 2, 3, 4],
        ("gap to the target", "0 s"): [0],
        ("gap to the target", "up to 1 minute"): [1],
        ("gap to the target", "up to 1 hour"): [2],
        ("gap to the target", "up to 1 day"): [3],
        ("gap to the target", "over 1 day"): [4],
        ("history", "up to 10 events"): [0],
        ("history", "up to 50"): [1, 2],
        ("history", "up to 200"): [3],
        ("history", "over 200"): [4],
        ("age of the item", "first event later"): [3],
        ("age of the item", "up to 1 year"): [2],
        ("age of the item", "over 1 year"): [0, 1],
        ("age of the item", "not in training"): [4],
    }
    assert sliced()["history", "up to 50"].n_cases == 2
