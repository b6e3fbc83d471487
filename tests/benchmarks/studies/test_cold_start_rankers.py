"""Cold-start splits without leaks from hidden items, and the rankers of the study."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.evaluation.baselines import ItemTransitions, Popularity
from models.evaluation.full_ranking import evaluate
from models.evaluation.protocols import EvaluationTask, leave_one_out_5_core, leave_one_out_hstu
from tests.benchmarks.studies.cold_start_rankers import (
    Among,
    AtRandom,
    Likeness,
    Shortened,
    cold_items,
)
from tests.support.small import events_of
from tests.support.training import content, drawn_log

ITEMS = 30


def task(seed: int = 0) -> EvaluationTask:
    """Fifty users who took nearly all of thirty items."""
    return leave_one_out_5_core(drawn_log(seed, [25] * 50, ITEMS, again=False))


def test_a_tenth_of_the_items_is_hidden_by_the_seed() -> None:
    """So many as asked; the same of one seed, others of another."""
    found = [cold_items(task(), seed=seed).hidden for seed in (0, 0, 1)]
    assert [hidden.sum() for hidden in found] == [3, 3, 3]
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).any()
    assert cold_items(task(), share=0.5).hidden.sum() == 15
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="share must lie in"):
            cold_items(task(), share=share)


def test_training_knows_nothing_of_what_is_hidden() -> None:
    """Events, validation cases and their histories are the task's without the hidden items."""
    whole = task()
    cold = cold_items(whole, share=0.3)
    hidden = set(np.flatnonzero(cold.hidden).tolist())
    assert cold.validation is not None
    assert whole.validation is not None
    for user in range(whole.train.n_users):
        left = [item for item in events_of(whole.train, user).items.tolist() if item not in hidden]
        assert events_of(cold.train, user).items.tolist() == left
    assert cold.validation.history is cold.train
    kept = [target for target in whole.validation.targets.tolist() if target not in hidden]
    assert cold.validation.targets.tolist() == kept


def test_what_is_fitted_is_renumbered_in_order() -> None:
    """Rows of the items that are left name the same items; users keep theirs."""
    cold = cold_items(task(), share=0.3)
    left = np.flatnonzero(~cold.hidden)
    log, cases = cold.fitting()
    assert log.n_items == len(left) == 21
    assert (left[log.items] == cold.train.items).all()
    assert (log.offsets == cold.train.offsets).all()
    assert cases is not None
    assert cold.validation is not None
    assert (left[cases.targets] == cold.validation.targets).all()
    assert (cases.users == cold.validation.users).all()
    assert cases.history is log


def test_a_task_without_validation_has_none() -> None:
    """A task without validation cases keeps none."""
    cold = cold_items(leave_one_out_hstu(drawn_log(1, [12] * 20, ITEMS, again=False)))
    assert cold.validation is None
    assert cold.fitting()[1] is None


def test_test_cases_are_those_of_hidden_targets_with_all_that_came_before() -> None:
    """Histories are whole: what a user took of other hidden items is known to the service too."""
    whole = task()
    cold = cold_items(whole, share=0.3)
    assert cold.test.history is whole.test.history
    chosen = [bool(cold.hidden[target]) for target in whole.test.targets.tolist()]
    assert 0 < sum(chosen) < len(chosen)
    assert cold.test.users.tolist() == whole.test.users[chosen].tolist()
    assert cold.hidden[cold.test.targets].all()


def test_popularity_never_finds_a_hidden_item() -> None:
    """Popularity ranks hidden items behind all others, and ties among themselves."""
    cold = cold_items(task(), share=0.5)
    popularity = Popularity.fit(cold.train)
    alone = evaluate(Among(popularity, cold.hidden), cold.test, k=3)
    for rank, user in zip(alone.ranks.tolist(), cold.test.users.tolist(), strict=True):
        seen = set(events_of(cold.test.history, user).items.tolist())
        assert rank == sum(item not in seen for item in np.flatnonzero(cold.hidden).tolist()) - 1
    everything = evaluate(popularity, cold.test)
    for rank, user in zip(everything.ranks.tolist(), cold.test.users.tolist(), strict=True):
        assert rank == ITEMS - len(set(events_of(cold.test.history, user).items.tolist())) - 1


def test_among_ranks_some_items_alone() -> None:
    """A target's rank counts only the items that are among them."""
    cold = cold_items(task(), share=0.5)
    drawn = AtRandom()
    ranks = evaluate(Among(drawn, cold.hidden), cold.test).ranks
    users, targets = cold.test.users, cold.test.targets
    scores = drawn.scores(cold.test.history, users, None)
    for rank, row, user, target in zip(ranks, scores, users, targets, strict=True):
        rivals = set(np.flatnonzero(cold.hidden)) - set(events_of(cold.test.history, user).items)
        assert rank == sum(row[item] > row[target] for item in rivals)


@pytest.mark.parametrize("events", [1, 3])
def test_a_shortened_history_is_its_newest_events(events: int) -> None:
    """Scores are those of users who did nothing else, though all they had stays out of ranks."""
    whole = task()
    ranker = ItemTransitions.fit(whole.train)
    users = np.arange(5, dtype=np.int32)
    short = Shortened(ranker, events)
    history = whole.test.history
    newest = [events_of(history, user).items[-events:].tolist() for user in range(5)]
    bare = drawn_log(2, [events] * 5, ITEMS)
    alone = type(bare)(
        np.array(newest, dtype=np.int32).ravel(),
        bare.timestamps,
        bare.weights,
        bare.types,
        bare.offsets,
        ITEMS,
    )
    got = short.scores(history, users, None)
    np.testing.assert_allclose(got, ranker.scores(alone, users, None))
    assert evaluate(short, whole.test).ranks.max() < ITEMS - 24  # all of the history left out


def test_an_order_at_random_is_a_users_own_and_stays() -> None:
    """Random scores are fixed per user and seed and differ between users."""
    log = drawn_log(0, [3, 3, 3], 2_000)
    scores = AtRandom(5).scores(log, np.array([2, 0], np.int32), None)
    again = AtRandom(5).scores(log, np.array([0], np.int32), None)
    assert (scores[1] == again[0]).all()
    assert (scores[0] != scores[1]).mean() > 0.99
    assert abs(scores.mean() - 0.5) < 0.02
    assert (AtRandom(6).scores(log, np.array([0], np.int32), None) != again).any()
    assert AtRandom().scores(log, np.zeros(0, np.int32), None).shape == (0, 2_000)


def test_likeness_is_to_the_newest_texts() -> None:
    """The sum of cosines to the twenty newest liked events, by loops; nothing without any."""
    log = drawn_log(3, [30, 4, 0], 12)
    texts = content(12)
    scores = Likeness(texts).scores(log, np.arange(3, dtype=np.int32), None)
    for user in range(3):
        newest = events_of(log, user).items[-20:].tolist()
        wanted = [sum(float(texts[item] @ texts[j]) for j in newest) for item in range(12)]
        np.testing.assert_allclose(scores[user], wanted, atol=1e-5)
    types = np.arange(len(log), dtype=np.int16) % 2
    mixed = replace(log, types=types, dislike_type=1)
    scores = Likeness(texts).scores(mixed, np.arange(1, dtype=np.int32), None)
    liked = events_of(log, 0).items[::2].tolist()
    wanted = [sum(float(texts[item] @ texts[j]) for j in liked) for item in range(12)]
    np.testing.assert_allclose(scores[0], wanted, atol=1e-5)
