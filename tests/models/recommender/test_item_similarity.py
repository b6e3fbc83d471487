"""Item similarities against plain loops: what is kept of EASE, and the part of the score."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.recommender import co_occurrence
from models.recommender.co_occurrence import (
    SIMILARITY_DEPTH,
    ItemSimilarity,
    ease_similarity,
    ease_weights,
)
from tests.support.small import random_similarity
from tests.support.training import drawn_log

ITEMS = 9
TABLE = random_similarity(3, ITEMS, 4)
quick = settings(max_examples=50, deadline=None, derandomize=True)
recents = st.lists(st.tuples(st.integers(-1, ITEMS - 1), st.booleans()), max_size=12)


def weight(table: ItemSimilarity, item: int, target: int) -> float:
    """The weight of one pair, 0 where it is not kept."""
    pairs = zip(table.items[item].tolist(), table.weights[item].tolist(), strict=True)
    return math.fsum(value for column, value in pairs if column == target)


@quick
@given(events=recents)
def test_the_part_sums_each_liked_item_once(events: list[tuple[int, bool]]) -> None:
    """Items that come again count once, those outside the table and disliked ones never."""
    recent = torch.tensor([item for item, _ in events], dtype=torch.int64)
    liked = torch.tensor([is_liked for _, is_liked in events], dtype=torch.bool)
    sums = TABLE.sums(recent, liked)
    shares = TABLE.shares(recent, liked, torch.arange(ITEMS))
    distinct = {item for item, is_liked in events if is_liked and item >= 0}
    expected = [math.fsum(weight(TABLE, item, target) for item in distinct)
                for target in range(ITEMS)]  # fmt: skip
    assert sums.tolist() == pytest.approx(expected, abs=1e-5)
    assert shares.sum(1).tolist() == pytest.approx(expected, abs=1e-5)
    for at, (item, is_liked) in enumerate(events):
        if not is_liked or item < 0:
            assert not shares[:, at].any()
    best = sorted((target for target in range(ITEMS) if expected[target] > 1e-6),
                  key=lambda target: -expected[target])  # fmt: skip
    found = TABLE.top(recent, TABLE.sums(recent, liked), 3).tolist()
    assert sums[found].tolist() == pytest.approx([expected[target] for target in best[:3]])


def test_events_on_one_item_share_it_equally_within_the_depth() -> None:
    """Two events on an item have half of it each; an event beyond the depth has nothing."""
    item = int((TABLE.weights != 0).any(1).nonzero()[0])
    target = int(TABLE.items[item, TABLE.weights[item] != 0][0])
    recent = torch.full((SIMILARITY_DEPTH + 1,), -1)
    recent[[0, 7, -1]] = item
    liked = torch.ones(len(recent), dtype=torch.bool)
    (shares,) = TABLE.shares(recent, liked, torch.tensor([target])).tolist()
    whole = weight(TABLE, item, target)
    assert len(shares) == SIMILARITY_DEPTH
    assert (shares[0], shares[7]) == (pytest.approx(whole / 2), pytest.approx(whole / 2))
    assert float(TABLE.sums(recent, liked)[target]) == pytest.approx(whole)


def test_the_largest_weights_are_kept_by_magnitude(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each item the weights of largest magnitude are kept, negative ones among them."""
    monkeypatch.setattr("models.recommender.co_occurrence.WEIGHTS_PER_ITEM", 3)
    log = drawn_log(1, [5, 8, 3, 6, 7, 4], ITEMS)
    every, kept = ease_weights(log).numpy(), ease_similarity(log)
    assert kept.items.shape == kept.weights.shape == (ITEMS, 3)
    assert (kept.items.dtype, kept.weights.dtype) == (torch.int32, torch.float32)
    assert (every < 0).any()
    for item in range(ITEMS):
        largest = np.sort(np.abs(every[item]))[::-1][:3]
        assert sorted(kept.weights[item].abs().tolist()) == pytest.approx(sorted(largest))
        for column, value in zip(kept.items[item].tolist(), kept.weights[item].tolist(),
                                 strict=True):  # fmt: skip
            assert value == (every[item, column] if column < ITEMS else 0.0)


def test_a_log_with_few_items_keeps_them_all() -> None:
    """A catalogue smaller than what is kept of an item has every weight, and none to itself."""
    log = drawn_log(2, [4, 3, 5], 4)
    kept = ease_similarity(log)
    assert kept.items.shape == (4, 4)
    for item in range(4):
        assert weight(kept, item, item) == 0.0


@pytest.mark.parametrize("rounding", [0.0, 0.01])
def test_both_precisions_solve_the_regression(
    monkeypatch: pytest.MonkeyPatch, rounding: float
) -> None:
    """The weights equal a float64 solution by numpy, in double precision as in single."""
    monkeypatch.setattr(co_occurrence, "_ROUNDING", rounding)
    log = drawn_log(5, [12] * 400, 30)
    users = np.zeros((400, 30))
    users[log.users, log.items] = 1.0
    inverse = np.linalg.inv(users.T @ users + 200.0 * np.eye(30))
    expected = -inverse / np.diag(inverse)
    np.fill_diagonal(expected, 0.0)
    found = ease_weights(log)
    np.testing.assert_allclose(found, expected, atol=1e-6 if rounding else 1e-8)
    assert found.dtype == torch.float32
