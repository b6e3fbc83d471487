"""Profile of a log: repeats, baskets, target weights and the prediction task."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from models.data.interactions import Interactions, at_import, lacks_order
from models.evaluation.splits import leave_one_out
from models.training.log_profile import (
    PredictionTask,
    first_interactions,
    has_repeat_consumption,
    hold_out,
    hold_out_rule,
    imported_first,
    prediction_task,
    repeat_share,
    target_weights,
    tied_share,
    without_order,
)
from service.lab.protocols import next_basket
from tests.support.small import DAY, SECOND, cycle


def test_repeats_are_the_share_of_events_on_what_was_had_before() -> None:
    users, items = [0, 0, 0, 0, 1, 1, 1, 2], [3, 3, 4, 3, 3, 4, 4, 0]
    log = Interactions.from_columns(users, items, range(8), n_users=4, n_items=5)
    assert repeat_share(log) == pytest.approx(3 / 8)
    assert first_interactions(log).tolist() == [True, False, True, False, True, True, False, True]
    assert repeat_share(cycle(users=4, length=3, items=5)) == 0
    nothing = Interactions.from_columns([], [], [], n_users=2, n_items=5)
    assert repeat_share(nothing) == 0
    types = np.array([0, 1, 0, 0, 0, 0, 0, 0], np.int16)  # a return to what was liked and disliked
    assert repeat_share(replace(log, types=types, dislike_type=1)) == pytest.approx(2 / 7)


def test_ties_are_the_share_of_events_at_the_time_of_the_one_before() -> None:
    log = Interactions.from_columns(
        [0, 0, 0, 1, 1, 2], range(6), [5, 5, 7, 7, 7, 7], n_users=3, n_items=6
    )
    assert tied_share(log) == pytest.approx(2 / 3)
    assert tied_share(Interactions.from_columns([0, 1], [0, 0], [1, 1], n_users=2, n_items=1)) == 0


def test_a_target_counts_by_its_weight_over_the_median() -> None:
    log = Interactions.from_columns(
        [0] * 6, range(6), range(6), [1, 2, 2, 3, 500, 0.01], [0, 0, 0, 0, 0, 0],
        n_users=1, n_items=6,
    )  # fmt: skip
    assert target_weights(log).tolist() == pytest.approx([0.5, 1, 1, 1.5, 10, 0.1])
    disliked = replace(log, types=np.array([0, 1, 0, 0, 0, 0], np.int16), dislike_type=1)
    assert target_weights(disliked)[1] == 0


def shop(*, apart: int, every: int = 4) -> Interactions:
    """480 users with five baskets of four items, a day apart, their events so far apart.

    Each item but every fourth was had before.
    """
    rng = np.random.default_rng(0)
    users, items, times = [], [], []
    for user in range(480):
        liked = rng.permutation(60)[:8]
        for basket in range(5):
            for at in range(4):
                users.append(user)
                items.append(int(rng.integers(60)) if at % every == 0 else int(rng.choice(liked)))
                times.append(basket * 30 * DAY + user * SECOND + at * apart)
    return Interactions.from_columns(users, items, times, n_users=480, n_items=60)


def test_holdout_cases_record_whether_a_next_basket_is_predicted() -> None:
    log = shop(apart=0)
    assert has_repeat_consumption(log)
    assert tied_share(log) == pytest.approx(15 / 19)
    split = leave_one_out(log)
    assert prediction_task(split.train, split.validation) == PredictionTask(
        next_basket=False, repeat_consumption=True
    )
    task = next_basket(log, at=4 * 30 * DAY)
    assert task.validation is not None
    assert prediction_task(task.train, task.validation) == PredictionTask(
        next_basket=True, repeat_consumption=True
    )
    assert prediction_task(task.train) == PredictionTask(next_basket=False, repeat_consumption=True)


def test_events_at_times_of_their_own_are_no_baskets() -> None:
    task = next_basket(shop(apart=SECOND), at=4 * 30 * DAY)
    assert task.validation is not None
    assert not prediction_task(task.train, task.validation).next_basket


def test_cases_without_repeats_disable_repeat_consumption() -> None:
    task = next_basket(shop(apart=0), at=4 * 30 * DAY, new_only=True)
    assert task.validation is not None
    assert prediction_task(task.train, task.validation) == PredictionTask(
        next_basket=True, repeat_consumption=False
    )
    few = task.validation.where(np.arange(len(task.validation)) < 8)
    assert prediction_task(task.train, few) == PredictionTask(
        next_basket=False, repeat_consumption=True
    ), "too few to tell"
    new = cycle(users=40, length=5, items=30)
    assert not prediction_task(new, leave_one_out(new).test).repeat_consumption


def test_a_log_is_held_out_by_one_rule() -> None:
    """What is left without the last baskets is split by baskets too, though most have one left."""
    log = shop(apart=0)
    rest, _ = hold_out(log)
    few = rest.where(rest.positions < np.where(rest.users % 3 == 0, len(rest), 4))
    assert set(hold_out(few)[1].gaps().tolist()) == {0}  # alone it would be split by events
    _, cases = hold_out_rule(log)(few)
    assert (cases.gaps() > 0).all()
    assert set(cases.users.tolist()) == set(range(0, 480, 3))


def test_what_is_held_out_is_the_last_event_or_the_last_basket() -> None:
    log = shop(apart=SECOND)
    history, cases = hold_out(log)
    assert len(cases) == 480
    assert len(history) == len(log) - 480
    log = shop(apart=0)
    history, cases = hold_out(log)
    assert len(history) == len(log) - 480 * 4
    assert set(cases.users.tolist()) == set(range(480))
    assert prediction_task(history, cases) == PredictionTask(
        next_basket=True, repeat_consumption=True
    )
    without_times = replace(log, timestamps=np.zeros_like(log.timestamps))
    history, cases = hold_out(without_times)
    assert len(cases) == 480
    assert prediction_task(history, cases) == PredictionTask(
        next_basket=False, repeat_consumption=True
    )


@pytest.mark.parametrize("at", [1_000 * DAY + 123, 7])
def test_a_minority_with_the_time_of_an_import_comes_first(at: int) -> None:
    """Events of imports without times are found beside dates, and become nobody's newest."""
    dates, ratings = np.arange(300) // 3 * DAY, at + np.arange(100) // 50 * SECOND * 8
    wishes = np.full(100, 900 * DAY + 77)  # of another import
    log = logged(np.concatenate([dates, ratings, wishes]))
    imported = at_import(log.timestamps)
    assert not lacks_order(imported)
    assert sorted(log.items[imported].tolist()) == list(range(300, 500))
    keys = np.random.default_rng(0).permutation(500).astype(np.uint64)
    first = imported_first(log, imported, keys)
    key_of = dict(zip(log.items.tolist(), keys.tolist(), strict=True))
    for begin, end in pairwise(first.offsets.tolist()):
        items, times = first.items[begin:end].tolist(), first.timestamps[begin:end].tolist()
        late = [item for item in items if item < 300]
        early = items[: len(items) - len(late)]
        assert (early, late) == (sorted(early, key=key_of.__getitem__), sorted(late))
        assert times == [0] * len(early) + [item // 3 * DAY for item in late]


def test_dates_and_recorded_times_are_no_import() -> None:
    busy = np.concatenate([np.arange(300) // 3 * DAY, np.full(100, 200 * DAY)])
    recorded = np.arange(400) * SECOND // 7
    assert not at_import(busy).any()
    assert not at_import(recorded).any()


def logged(times: NDArray[np.int64]) -> Interactions:
    """Twenty users in turn, each event on an item of its own, at these times."""
    count = len(times)
    users, items = np.arange(count) % 20, np.arange(count)
    return Interactions.from_columns(users, items, times, n_users=20, n_items=count)


@pytest.mark.parametrize(
    ("times", "lacks"),
    [
        (np.full(400, 7), True),  # one time for all
        (np.arange(400) // 40 * 8 * SECOND, True),  # of the batches of an import
        (np.concatenate([np.full(210, 7), np.arange(190) * DAY]), True),  # for most
        (np.concatenate([np.full(190, 7), np.arange(210) * DAY]), False),
        (np.arange(400) // 40 * DAY, False),  # dates are times
        (np.arange(400) * SECOND, False),  # one after the other
        (np.arange(400) // 4 * SECOND, False),  # baskets of a busy hour
        (np.zeros(0, np.int64), False),
    ],
)
def test_times_of_an_import_are_none(times: NDArray[np.int64], lacks: bool) -> None:
    """A log lacks times if half of its events lie within an hour, at ten or more a time."""
    assert lacks_order(at_import(times)) is lacks


def test_a_log_without_order_holds_out_the_same_events_as_it_grows() -> None:
    """Users' events follow their keys at one time; those of others change nothing."""
    log = logged(np.full(400, 7))
    keys = np.random.default_rng(0).permutation(400).astype(np.uint64)
    found = without_order(log, keys[log.items])
    assert set(found.timestamps.tolist()) == {7}
    for user in range(20):
        own = slice(found.offsets[user], found.offsets[user + 1])
        expected = sorted(range(user, 400, 20), key=lambda item: keys[item])
        assert found.items[own].tolist() == expected
    history, cases = hold_out(found)
    assert cases.targets.tolist() == found.items[found.offsets[1:] - 1].tolist()
    assert len(history) == 380
    fewer = log.where(log.users >= 5)
    kept = without_order(fewer, keys[fewer.items])
    assert hold_out(kept)[1].targets.tolist() == cases.targets[5:].tolist()
