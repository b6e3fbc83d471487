"""Transition counts and item similarities, compared with loops and dense matrices."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.data.interactions import Interactions
from models.recommender import co_occurrence
from models.recommender.co_occurrence import (
    SIMILARITY_DEPTH,
    SMALL_LOG_WINDOW,
    ItemSimilarity,
    TransitionCounts,
    count_transitions,
    ease_similarity,
    ease_weights,
)
from tests.support.small import random_followers, random_similarity
from tests.support.training import drawn_log
from tests.support.transition_logs import ITEMS, counted, damped, histories, logs, quick, table

# ---------------------------------------------------------------------------- counting


@quick
@given(log=logs())
def test_counts_equal_a_loop_over_all_pairs(log: Interactions) -> None:
    """Of any log, with everything kept; items that come again follow themselves."""
    found, expected = table(count_transitions(log, ITEMS)), counted(histories(log))
    assert found.keys() == expected.keys()
    for pair, count in expected.items():
        assert found[pair] == pytest.approx(count, rel=1e-5)


@quick
@given(log=logs())
def test_counts_of_small_logs_are_damped_by_popularity(log: Interactions) -> None:
    found = table(count_transitions(log, ITEMS, SMALL_LOG_WINDOW))
    expected = damped(counted(histories(log), power=1), log)
    assert found == pytest.approx(expected, rel=1e-5)


@quick
@given(log=logs(), most=st.integers(1, ITEMS + 2))
def test_largest_counts_are_retained(log: Interactions, most: int) -> None:
    kept = count_transitions(log, most)
    assert kept.items.shape == kept.counts.shape == (ITEMS, most)
    assert (kept.items.dtype, kept.counts.dtype) == (torch.int32, torch.float32)
    found, every = table(kept), counted(histories(log))
    for row in range(ITEMS):
        there = sorted((count for (item, _), count in every.items() if item == row), reverse=True)
        mine = [count for (item, _), count in found.items() if item == row]
        assert mine == pytest.approx(there[:most], rel=1e-5)
        assert mine == sorted(mine, reverse=True)
    for pair, count in found.items():
        assert count == pytest.approx(every[pair], rel=1e-5)


def test_a_log_without_events_has_no_transitions() -> None:
    """Its table is empty, whatever its width."""
    empty = Interactions.from_columns([], [], [], n_users=2, n_items=3)
    assert count_transitions(empty, 0).items.shape == (3, 0)
    assert table(count_transitions(empty, 2)) == {}


# ---------------------------------------------------------------------------- after a user's items


def loop(kept: TransitionCounts, items: Sequence[int], target: int) -> list[float]:
    """What each of the last eight items, newest first, adds to F(target)."""
    counts = table(kept)
    return [0.3**k * counts.get((item, target), 0.0) for k, item in enumerate(items[:8])]


@quick
@given(
    seed=st.integers(0, 1000),
    most=st.integers(0, 6),
    items=st.lists(st.integers(-1, ITEMS - 1), max_size=12),
)
def test_sums_and_shares_equal_the_loop(seed: int, most: int, items: list[int]) -> None:
    kept = random_followers(seed, ITEMS, most)
    total = kept.sums(torch.tensor(items, dtype=torch.int64))
    assert total.shape == (ITEMS,)
    targets = [*range(ITEMS), 3, -1, 0]  # some twice, and one that was not trained
    every = kept.shares(torch.tensor(items, dtype=torch.int64), torch.tensor(targets))
    for target, shares in zip(targets, every, strict=True):
        expected = loop(kept, items, target)
        assert shares.tolist() == pytest.approx(expected, abs=1e-5)
        if target >= 0:
            assert float(total[target]) == pytest.approx(sum(expected), abs=1e-5)


@pytest.mark.parametrize("size", [12, 5_000])
def test_top_is_the_order_of_all_sums(size: int) -> None:
    """`top` returns the items of largest positive F."""
    generator = torch.Generator().manual_seed(size)
    columns = torch.randint(size + 1, (size, 6), generator=generator, dtype=torch.int32)
    counts = torch.rand(size, 6, generator=generator) * (columns < size)
    kept, items = TransitionCounts(columns, counts), torch.tensor([3, -1, 7, 3, 11])
    total = kept.sums(items)
    for count in (4, 1_000):
        found = kept.top(items, count)
        best = [n for n in torch.argsort(-total, stable=True).tolist() if total[n] > 0][:count]
        assert total[found].tolist() == total[torch.tensor(best)].tolist()
        assert len(set(found.tolist())) == len(found) == min(count, len(best))


SIMILAR = 9
TABLE = random_similarity(3, SIMILAR, 4)
recents = st.lists(st.tuples(st.integers(-1, SIMILAR - 1), st.booleans()), max_size=12)


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
    shares = TABLE.shares(recent, liked, torch.arange(SIMILAR))
    distinct = {item for item, is_liked in events if is_liked and item >= 0}
    expected = [math.fsum(weight(TABLE, item, target) for item in distinct)
                for target in range(SIMILAR)]  # fmt: skip
    assert sums.tolist() == pytest.approx(expected, abs=1e-5)
    assert shares.sum(1).tolist() == pytest.approx(expected, abs=1e-5)
    for at, (item, is_liked) in enumerate(events):
        if not is_liked or item < 0:
            assert not shares[:, at].any()
    best = sorted((target for target in range(SIMILAR) if expected[target] > 1e-6),
                  key=lambda target: -expected[target])  # fmt: skip
    found = TABLE.top(recent, TABLE.sums(recent, liked), 3).tolist()
    assert sums[found].tolist() == pytest.approx([expected[target] for target in best[:3]])


def test_events_on_one_item_share_it_equally_within_the_depth() -> None:
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
    monkeypatch.setattr("models.recommender.co_occurrence.WEIGHTS_PER_ITEM", 3)
    log = drawn_log(1, [5, 8, 3, 6, 7, 4], SIMILAR)
    every, kept = ease_weights(log).numpy(), ease_similarity(log)
    assert kept.items.shape == kept.weights.shape == (SIMILAR, 3)
    assert (kept.items.dtype, kept.weights.dtype) == (torch.int32, torch.float32)
    assert (every < 0).any()
    for item in range(SIMILAR):
        largest = np.sort(np.abs(every[item]))[::-1][:3]
        assert sorted(kept.weights[item].abs().tolist()) == pytest.approx(sorted(largest))
        for column, value in zip(kept.items[item].tolist(), kept.weights[item].tolist(),
                                 strict=True):  # fmt: skip
            assert value == (every[item, column] if column < SIMILAR else 0.0)


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
