"""Full ranking on five users and six items, every rank worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.full_ranking import evaluate
from models.evaluation.splits import Holdout, leave_one_out
from tests.support.small import events_of

NEVER = -np.inf


class Table:
    """Scores looked up by user, and a record of what was asked."""

    def __init__(self, table: object) -> None:
        self.table = np.asarray(table, dtype=np.float32)
        self.asked: list[tuple[list[int], list[int] | None]] = []

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        self.asked.append(
            (users.tolist(), None if request_times is None else request_times.tolist())
        )
        return self.table[users]


HISTORY = Interactions.from_columns(
    [0, 0, 1, 2, 2, 3],
    [0, 1, 2, 0, 5, 3],
    [0, 10, 20, 30, 40, 50],
    n_users=5,
    n_items=6,
)
HOLDOUT = Holdout(
    users=np.array([0, 1, 2, 3, 4], dtype=np.int32),
    targets=np.array([2, 3, 4, 3, 5], dtype=np.int32),
    timestamps=np.array([11, 30, 50, 60, 70], dtype=np.int64),
    history=HISTORY,
)
SCORES = [
    [9, 8, 5, 1, 2, 3],  # 0 and 1 are seen: the target 2 is first
    [7, 6, 9, 5, 4, 3],  # 2 is seen: 0 and 1 stand before the target 3
    [9, 1, 2, 2, 2, 9],  # 0 and 5 are seen: 2 and 3 tie with the target 4 and rank before it
    [4, 0, 0, 3, 0, 0],  # the target 3 was seen before and stays a candidate, behind 0
    [1, 1, 1, 1, 1, 1],  # all tie: last of six
]
RANKS = [0, 2, 2, 1, 5]


def test_ranks_and_means_by_hand() -> None:
    """Seen items are left out but the target, ties count against it, and means follow."""
    metrics = evaluate(Table(SCORES), HOLDOUT, k=3)
    assert metrics.ranks.tolist() == RANKS
    assert (metrics.k, metrics.n_cases) == (3, 5)
    assert metrics.hr == pytest.approx(4 / 5)
    assert metrics.ndcg == pytest.approx((1 + 0.5 + 0.5 + 1 / math.log2(3)) / 5)
    assert metrics.mrr == pytest.approx((1 + 1 / 3 + 1 / 3 + 1 / 2 + 1 / 6) / 5)
    hr_error, ndcg_error = metrics.standard_errors()
    assert hr_error == pytest.approx(math.sqrt(0.8 * 0.2 / 4))
    assert 0 < ndcg_error < hr_error


def test_seen_items_can_stay() -> None:
    metrics = evaluate(Table(SCORES), HOLDOUT, exclude_seen=False)
    assert metrics.ranks.tolist() == [2, 3, 4, 1, 5]


def test_coverage_counts_items_shown_to_anyone() -> None:
    """Five of six items come first for someone; a target seen before may be shown again."""
    table = [
        [9, 8, 5, 1, 2, 3],  # shows 2
        [7, 6, 9, 5, 4, 3],  # shows 0
        [9, 1, 2, 2, 3, 9],  # shows 4
        [4, 0, 0, 5, 0, 0],  # shows 3, the target, though seen
        [1, 2, 0, 0, 0, 0],  # shows 1
    ]
    assert evaluate(Table(table), HOLDOUT, k=1).coverage == pytest.approx(5 / 6)
    assert evaluate(Table(table), HOLDOUT, k=100).coverage == 1.0


def test_never_is_behind_everything_and_not_shown() -> None:
    """Items scored -inf are not covered, and a target scored -inf ranks last."""
    table = np.full((5, 6), NEVER)
    table[:, 0] = 1.0
    metrics = evaluate(Table(table), HOLDOUT, k=3)
    assert metrics.ranks.tolist() == [3, 4, 3, 5, 5]
    assert metrics.coverage == pytest.approx(1 / 6)


def test_ranker_receives_the_target_time_only_on_request() -> None:
    table = Table(SCORES)
    evaluate(table, HOLDOUT)
    evaluate(table, HOLDOUT, use_target_time=True, batch_size=3)
    assert [times for _, times in table.asked] == [None, [11, 30, 50], [60, 70]]


def test_no_cases_have_no_means() -> None:
    """An empty holdout is evaluated to nan, not to a perfect or a failing score."""
    metrics = evaluate(Table(SCORES), HOLDOUT.where(np.zeros(5, dtype=np.bool_)))
    assert metrics.n_cases == 0
    assert all(math.isnan(x) for x in (metrics.hr, metrics.ndcg, metrics.mrr, metrics.coverage))


def test_broken_scores_are_refused_by_name() -> None:
    """NaN and wrong shapes say which ranker made them."""
    bad = np.zeros((5, 6))
    bad[3, 2] = np.nan
    with pytest.raises(ValueError, match="Table: scores contain NaN"):
        evaluate(Table(bad), HOLDOUT)
    with pytest.raises(ValueError, match=r"Table: scores must be \[5, 6\], got \[5, 4\]"):
        evaluate(Table(np.zeros((5, 4))), HOLDOUT)


def brute_force(table: NDArray[np.float32], holdout: Holdout, k: int) -> tuple[list[int], float]:
    """The protocol as loops over single items."""
    ranks: list[int] = []
    shown: set[int] = set()
    for user, target in zip(holdout.users.tolist(), holdout.targets.tolist(), strict=True):
        seen = set(events_of(holdout.history, user).items.tolist()) - {target}
        candidates = [item for item in range(holdout.history.n_items) if item not in seen]
        mine = table[user][target]
        ranks.append(sum(item != target and table[user][item] >= mine for item in candidates))
        best = np.argsort(-table[user][candidates], kind="stable")[:k]
        shown.update(candidates[place] for place in best)
    return ranks, len(shown) / holdout.history.n_items


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_ranking_item_by_item(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log = Interactions.from_columns(
        rng.integers(0, 30, 300),
        rng.integers(0, 40, 300),
        rng.integers(0, 100, 300),
        n_users=30,
        n_items=40,
    )
    _, _, test = leave_one_out(log)
    table = rng.permuted(np.tile(np.arange(40.0), (30, 1)), axis=1)
    table[::3] //= 5  # ties in every third user
    metrics = evaluate(Table(table), test, k=5, batch_size=7)
    ranks, _ = brute_force(Table(table).table, test, 5)
    assert metrics.ranks.tolist() == ranks
    untied = test.where(test.users % 3 > 0)
    ranks, coverage = brute_force(Table(table).table, untied, 5)
    assert evaluate(Table(table), untied, k=5).coverage == pytest.approx(coverage)


@pytest.mark.parametrize("use_target_time", [False, True])
def test_cases_of_one_user_and_time_are_scored_once(use_target_time: bool) -> None:
    rng = np.random.default_rng(5)
    users = np.repeat([0, 1, 2], 4).astype(np.int32)
    history = Interactions.from_columns(
        [0, 0, 1, 2, 2], [3, 1, 2, 0, 5], [1, 2, 1, 1, 2], n_users=3, n_items=8
    )
    times = np.array([10, 10, 10, 11, 10, 10, 10, 10, 10, 10, 10, 10])
    holdout = Holdout(users, rng.integers(0, 8, 12).astype(np.int32), times, history)
    asked: list[int] = []

    class Counted:
        def scores(self, history: Interactions, users: Any, request_times: Any) -> Any:
            asked.append(len(users))
            late = np.zeros(len(users)) if request_times is None else request_times
            place = np.arange(history.n_items)
            return np.sin(place * (1 + users[:, None]) + late[:, None]).astype(np.float32)

    together = evaluate(Counted(), holdout, use_target_time=use_target_time)
    assert asked == [4 if use_target_time else 3]
    alone = evaluate(Counted(), holdout, use_target_time=use_target_time, batch_size=1)
    assert together.ranks.tolist() == alone.ranks.tolist()
