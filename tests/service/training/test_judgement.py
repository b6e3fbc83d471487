"""Judgement of a model beside the baselines: two questions where users take items again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from models.data.interactions import Interactions
from models.evaluation.baselines import POPULARITY
from models.evaluation.full_ranking import RankingMetrics, ndcg_gains
from models.evaluation.splits import Holdout
from models.training.log_profile import hold_out
from service.training.judgement import HEED, QuestionMetrics, best_replacement, judge
from service.training.train_and_publish import fit_model
from tests.support.tiny import QUICK
from tests.support.training import content

DAY = 86_400_000_000
WEAK = replace(
    QUICK, train_config=replace(QUICK.train_config, epochs=1, attention_epochs=1, final_epochs=1)
)


def found(first: range) -> RankingMetrics:
    """Metrics of 20 cases, of which these rank first and the others nowhere."""
    ranks = np.array([0 if case in first else 99 for case in range(20)], np.int64)
    return RankingMetrics(10, 0.0, float(ndcg_gains(ranks).mean()), 0.0, 0.0, 20, ranks)


@pytest.mark.parametrize(
    ("baselines", "served"),
    [
        ({"a": (range(18), range(8))}, "a"),  # better at both
        ({"a": (range(18), range(4))}, "a"),  # better at the next, alike in what is new
        ({"a": (range(10), range(12))}, "a"),  # better in what is new alone
        ({"a": (range(2, 13), range(12))}, "a"),
        ({"a": (range(20), range(0))}, None),  # by far better at the next, with nothing new
        ({"a": (range(0), range(20))}, None),
        ({"a": (range(2, 13), range(2, 7))}, None),  # within the noise of both
        ({"a": (range(20), range(0)), "b": (range(16), range(5))}, "b"),  # loses neither
        ({"a": (range(16), range(5)), "b": (range(17), range(5))}, "b"),
    ],
)
def test_a_baseline_replaces_a_model_that_it_is_nowhere_worse_than(
    baselines: dict[str, tuple[range, range]], served: str | None
) -> None:
    """Of 20 cases each, the model has 10 of what comes next first, and 4 of what is new."""
    rows = {name: [found(each) for each in firsts] for name, firsts in baselines.items()}
    assert best_replacement(rows, [found(range(10)), found(range(4))]) == served


@pytest.mark.parametrize(
    ("first", "served"),
    [(range(10), None), (range(2, 13), None), (range(12), "a"), (range(4), None)],
)
def test_one_question_is_decided_by_its_noise(first: range, served: str | None) -> None:
    """Without repeats, the best baseline is served if it is better by a standard error."""
    # Three cases more and two less are .05, beside .11; two more alone are .1, beside .07.
    rows = {"a": [found(first)], "b": [found(range(3))]}
    assert best_replacement(rows, [found(range(10))]) == served


def shop(*, again: bool, users: int = 40, baskets: int = 6) -> Interactions:
    """Baskets a week apart: a user's two staples and two drawn items, or four of these."""
    rng = np.random.default_rng(0)
    events = []
    for user in range(users):
        drawn = 4 + rng.permutation(36)
        for week in range(baskets):
            time = week * 7 * DAY + user * DAY // 100
            new = drawn[4 * week : 4 * week + (2 if again else 4)].tolist()
            staples = [user % 4, (user + 1) % 4] if again else []
            events += [(user, item, time) for item in [*staples, *new]]
    who, items, times = zip(*events, strict=True)
    return Interactions.from_columns(who, items, times, n_users=users, n_items=40)


def popular_hits(cases: Holdout, *, new_only: bool) -> tuple[float, float]:
    """Count by hand the share of cases, and of users, that popularity has among its first ten."""
    taken = Counter(cases.history.items.tolist())
    hits: dict[int, list[bool]] = {}
    for user, target in zip(cases.users.tolist(), cases.targets.tolist(), strict=True):
        mine = cases.history.items[cases.history.users == user].tolist()
        rivals = set(range(40)) - {target} - (set(mine) if new_only else set())
        if new_only and target in mine:
            continue
        ahead = sum(taken[rival] >= taken[target] for rival in rivals)
        hits.setdefault(user, []).append(ahead < 10)
    every = [hit for row in hits.values() for hit in row]
    return sum(every) / len(every), sum(any(row) for row in hits.values()) / len(hits)


@pytest.mark.parametrize("again", [True, False])
def test_repeats_are_asked_for_and_what_is_new(again: bool) -> None:
    """In a log with repeats, the targets that a user did not have are ranked once more."""
    log = shop(again=again)
    history, cases = hold_out(log)
    plan = WEAK.plan(history, content(40), cases, every_event=log)
    fitted = fit_model(plan, processes=1)
    judged = judge(fitted, exclude_seen=not again)
    told = judged.as_dict()
    hr, user_hr = popular_hits(cases, new_only=not again)
    assert told["metrics"]["cases"] == 40 * 4
    assert told["metrics"]["popularity_hr"] == pytest.approx(hr)
    assert told["baselines"]["popularity"]["user_hr"] == pytest.approx(user_hr)
    if not again:
        assert judged.new is None
        assert "new_items" not in told
        return
    new = told["new_items"]
    hr, user_hr = popular_hits(cases, new_only=True)
    assert new["metrics"]["cases"] == 40 * 2
    assert new["metrics"]["popularity_hr"] == pytest.approx(hr)
    assert new["baselines"]["popularity"]["user_hr"] == pytest.approx(user_hr)
    # What was bought before fills the next basket, but has nothing new.
    assert told["baselines"]["bought before"]["user_hr"] == 1
    assert new["baselines"]["bought before"]["hr"] == new["metrics"]["popularity_hr"]
    # Popularity needs a model to be served only where it is beaten at one of both.
    popular = QuestionMetrics(cases, found(range(3)), {POPULARITY: found(range(5))})
    beaten = QuestionMetrics(cases, found(range(5)), {POPULARITY: found(range(3))})
    for following, other, refused in (
        (popular, popular, True), (popular, beaten, False), (beaten, popular, False),
        (popular, None, True), (beaten, None, False),
    ):  # fmt: skip
        changed = replace(judged, served=HEED, next=following, new=other)
        assert changed.popular_is_best is refused
