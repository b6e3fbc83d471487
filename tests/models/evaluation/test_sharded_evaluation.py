"""Evaluation of the shards of a log beside that of the whole log: ranks, metrics, what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import Interactions
from models.evaluation.baselines import baseline_makers
from models.evaluation.full_ranking import (
    RankingMetrics,
    evaluate,
    mean,
    share_of_users,
    standard_error,
)
from models.evaluation.splits import Holdout, draw_cases, leave_last_basket_out, leave_one_out
from tests.support.shards import in_threads, shard_of
from tests.support.small import DAY

ITEMS, USERS, BATCH = 17, 40, 4


def drawn(seed: int, *, uneven: bool = False) -> Interactions:
    """Baskets of users over some weeks; uneven: nearly all of the users with an even number."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, USERS)
    if uneven:
        lengths[1::2] = rng.random(USERS // 2) < 0.2
    events = int(lengths.sum())
    return Interactions.from_columns(
        np.repeat(np.arange(USERS), lengths),
        (rng.beta(1, 2, events) * ITEMS).astype(np.int64),
        rng.integers(0, 120, events) * DAY // 4,
        types=(rng.random(events) < 0.1).astype(np.int16),
        n_users=USERS,
        n_items=ITEMS,
        dislike_type=1,
    )


def evaluated(
    log: Interactions, *, exclude_seen: bool
) -> dict[str, tuple[Holdout, RankingMetrics]]:
    """The cases of each user's last basket, ranked by every baseline."""
    history, cases = leave_last_basket_out(log)
    makers = baseline_makers(log, exclude_seen=exclude_seen)
    return {
        name: (
            cases,
            evaluate(make(history), cases, batch_size=BATCH, exclude_seen=exclude_seen),
        )
        for name, make in makers.items()
    }


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("exclude_seen", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_every_baseline_ranks_in_shards_as_in_the_whole_log(
    count: int, exclude_seen: bool, uneven: bool
) -> None:
    log = drawn(5, uneven=uneven)
    expected = evaluated(log, exclude_seen=exclude_seen)
    assert len(expected) == 5 - exclude_seen
    found = in_threads(
        count, lambda shards: evaluated(shard_of(log, shards), exclude_seen=exclude_seen)
    )
    for name, (cases, metrics) in expected.items():
        for index, own in enumerate(found):
            assert own.keys() == expected.keys()
            own_cases, own_metrics = own[name]
            mine = cases.users % count == index
            assert own_cases.users.tolist() == (cases.users[mine] // count).tolist()
            assert own_metrics.ranks.tolist() == metrics.ranks[mine].tolist()
            assert (own_metrics.n_cases, own_metrics.hr) == (metrics.n_cases, metrics.hr)
            assert own_metrics.coverage == metrics.coverage
            assert own_metrics.ndcg == pytest.approx(metrics.ndcg, rel=1e-12)
            assert own_metrics.mrr == pytest.approx(metrics.mrr, rel=1e-12)


def test_shards_without_a_case_have_the_metrics_of_the_others() -> None:
    nothing = Interactions.from_columns([], [], [], n_users=2, n_items=3)
    one = Interactions.from_columns([0, 0, 0], [0, 1, 2], [1, 2, 3], n_users=2, n_items=3)

    def hit_rate(shards: Processes) -> tuple[float, float]:
        first, second = (leave_one_out(shard_of(log, shards)).test for log in (one, nothing))
        ranker = baseline_makers(first.history, exclude_seen=True)["popularity"](first.history)
        return evaluate(ranker, first).hr, evaluate(ranker, second).hr

    for hr, without in in_threads(2, hit_rate):
        assert hr == 1
        assert np.isnan(without)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=2, max_size=3),
    seed=st.integers(0, 1000),
)
def test_means_and_errors_are_those_of_all_cases(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=size) for size in sizes]
    ranks = [rng.integers(0, 20, size) for size in sizes]
    users = [rng.integers(0, 4, size).astype(np.int32) for size in sizes]

    def measured(shards: Processes) -> tuple[float, float, float]:
        own = values[shards.index]
        return (
            mean(own, shards),
            standard_error(own, shards),
            share_of_users(users[shards.index], ranks[shards.index], shards=shards),
        )

    every = np.concatenate(values)
    everybody = np.concatenate([each + 10 * index for index, each in enumerate(users)])
    expected = (
        mean(every, SINGLE_PROCESS),
        standard_error(every),
        share_of_users(everybody, np.concatenate(ranks)),
    )
    for found in in_threads(len(sizes), measured):
        assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("most", [0, 7, 20, 1000])
def test_cases_are_drawn_over_all_shards(most: int) -> None:
    log = drawn(8)
    cases = leave_one_out(log).test

    def draw(shards: Processes) -> tuple[set[int], set[int], set[int]]:
        own = leave_one_out(shard_of(log, shards)).test
        some, more, again = (draw_cases(own, size, 3) for size in (most, most + 5, most))
        return set(some.users.tolist()), set(more.users.tolist()), set(again.users.tolist())

    found = in_threads(3, draw)
    assert sum(len(some) for some, _, _ in found) == min(most, len(cases))
    assert sum(len(more) for _, more, _ in found) == min(most + 5, len(cases))
    for some, more, again in found:
        assert some == again <= more


def test_each_case_is_drawn_as_often_as_another() -> None:
    """Over many seeds, cases of a small shard are drawn as often as those of a large one."""
    log = drawn(8, uneven=True)
    sizes = in_threads(2, lambda shards: len(leave_one_out(shard_of(log, shards)).test))
    extra = Interactions.from_columns(
        [*log.users, *[39] * 3], [*log.items, 0, 1, 2], [*log.timestamps, 1, 2, 3],
        n_users=USERS, n_items=ITEMS,
    )  # fmt: skip
    assert sizes[0] > 10 > sizes[1] == 0

    def share(shards: Processes) -> float:
        own = leave_one_out(shard_of(extra, shards)).test
        return float(np.mean([len(draw_cases(own, 6, seed)) / len(own) for seed in range(400)]))

    first, second = in_threads(2, share)
    assert first == pytest.approx(second, abs=0.08)
