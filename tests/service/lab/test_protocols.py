"""Training, validation and test parts of each protocol, compared with lists by hand."""

from __future__ import annotations

import numpy as np
import pytest

from models.data.interactions import Interactions
from models.evaluation.splits import Holdout
from models.training.log_profile import hold_out
from service.lab.protocols import (
    HSTU_MAX_SEEN,
    EvaluationTask,
    global_time,
    leave_one_out_5_core,
    leave_one_out_hstu,
    newest,
    next_basket,
    of_new_items,
)
from tests.support.small import DAY, events_of


def log(*events: tuple[int, int, int]) -> Interactions:
    users, items, times = zip(*events, strict=True)
    return Interactions.from_columns(
        users, items, times, n_users=max(users) + 1, n_items=max(items) + 1
    )


def cases(task: EvaluationTask, holdout: Holdout | None) -> set[tuple[int, int, int]]:
    """(user, item, time) of each case, items as in the log that was given."""
    assert holdout is not None
    items = task.items[holdout.targets].tolist()
    return set(zip(holdout.users.tolist(), items, holdout.timestamps.tolist(), strict=True))


def held(task: EvaluationTask, part: Interactions, user: int) -> list[int]:
    """The items of a user's history, as in the log that was given."""
    found: list[int] = task.items[events_of(part, user).items].tolist()
    return found


# Five users in a row on items 10 to 14, and one on an item of its own.
CORE = [(user, 10 + (user + n) % 5, 100 * n + user) for user in range(5) for n in range(5)]


def test_leave_one_out_5_core_keeps_the_core_and_holds_out_the_last_two() -> None:
    """Items and users below five events are gone; the last event is the test case."""
    task = leave_one_out_5_core(log(*CORE, (5, 20, 7), (0, 20, 8)))
    assert task.items.tolist() == [10, 11, 12, 13, 14]
    assert task.train.n_users == 5
    assert len(task.log) == 25
    assert cases(task, task.test) == {(u, 10 + (u + 4) % 5, 400 + u) for u in range(5)}
    assert cases(task, task.validation) == {(u, 10 + (u + 3) % 5, 300 + u) for u in range(5)}
    assert held(task, task.train, 2) == [12, 13, 14]
    assert held(task, task.test.history, 2) == [12, 13, 14, 10]
    assert task.every_event is task.test.history
    assert (task.exclude_seen, task.max_seen) == (True, None)


def test_leave_one_out_5_core_of_nothing() -> None:
    with pytest.raises(ValueError, match="five events"):
        leave_one_out_5_core(log((0, 0, 1), (1, 0, 2)))


def test_leave_one_out_hstu_fits_on_everything_but_the_last() -> None:
    task = leave_one_out_hstu(log((0, 3, 1), (0, 5, 2), (0, 9, 3), (1, 5, 1)))
    assert task.items.tolist() == [3, 5, 9]
    assert task.validation is None
    assert cases(task, task.test) == {(0, 9, 3)}
    assert held(task, task.train, 0) == [3, 5]
    assert held(task, task.train, 1) == [5]
    assert (task.exclude_seen, task.max_seen) == (True, HSTU_MAX_SEEN)


SHOP = [
    (0, 1, 10), (0, 2, 10), (0, 1, 50), (0, 3, 50), (0, 3, 90), (0, 1, 90), (0, 4, 90), (0, 5, 95),
    (1, 1, 20), (1, 2, 60), (1, 2, 91), (1, 2, 91), (1, 6, 97), (1, 2, 97), (1, 3, 97), (1, 6, 97),
    (1, 5, 98),
    (2, 7, 93),
]  # fmt: skip


def test_next_basket_by_hand() -> None:
    """Cases are the distinct items of each known user's first basket from the date on."""
    task = next_basket(log(*SHOP), at=90)
    assert cases(task, task.test) == {(0, 3, 90), (0, 1, 90), (0, 4, 90), (1, 2, 91)}
    assert not task.exclude_seen
    assert task.date == 90
    assert held(task, task.test.history, 0) == [1, 2, 1, 3]


def test_the_question_of_new_items_by_hand() -> None:
    """Cases are those of the next basket that the user did not have, without a training anew."""
    task = next_basket(log(*SHOP), at=90)
    asked = of_new_items(task)
    assert asked is not None
    assert cases(asked, asked.test) == {(0, 4, 90)}
    assert (asked.exclude_seen, asked.name) == (True, "next basket, new items")
    assert (asked.train, asked.every_event) == (task.train, task.every_event)
    assert of_new_items(asked) is None
    again = task._replace(test=task.test.where(task.test.targets_seen()))
    assert of_new_items(again) is None


def test_next_new_item_by_hand() -> None:
    """Cases are the items new to the user in the first basket from the date on with any.

    What was taken at one time has no first, and counts once.
    """
    task = next_basket(log(*SHOP), at=90, new_only=True)
    assert cases(task, task.test) == {(0, 4, 90), (1, 6, 97), (1, 3, 97)}
    assert len(task.test) == 3
    assert task.exclude_seen


@pytest.mark.parametrize("new_only", [False, True])
def test_validation_users_lose_their_later_events(new_only: bool) -> None:
    """A quarter of the users lose training events from the validation date on; others none."""
    rng = np.random.default_rng(0)
    columns = (rng.integers(0, 8, 400), rng.integers(0, 30, 400), rng.integers(0, 1000, 400))
    whole = log(*sorted(zip(*(column.tolist() for column in columns), strict=True)))
    task = next_basket(whole, new_only=new_only)
    assert task.validation is not None
    assert len(task.test) > 0
    held = set(task.validation.users.tolist())
    assert len(held) == 2
    first, second = task.validation.timestamps.min(), task.test.timestamps.min()
    assert task.validation.timestamps.max() < second
    assert task.validation.history is task.train
    for user in range(8):
        times = events_of(whole, user).timestamps
        until = first if user in held else second
        assert events_of(task.train, user).timestamps.tolist() == times[times < until].tolist()
        every = events_of(task.every_event, user).timestamps
        assert every.tolist() == times[times < second].tolist()
        assert (
            events_of(task.test.history, user).timestamps.tolist() == times[times < second].tolist()
        )


def test_newest_holds_out_twice_as_a_training_does() -> None:
    """Last baskets of a log of baskets, last events of another; the ones before validate."""
    single = log(*((user, 10 + n, 100 * n) for user in range(3) for n in range(4)))
    task = newest(single, hold_out, exclude_seen=True)
    assert (task.name, task.exclude_seen) == ("last event", True)
    assert cases(task, task.test) == {(user, 13, 300) for user in range(3)}
    assert cases(task, task.validation) == {(user, 12, 200) for user in range(3)}
    assert held(task, task.train, 1) == [10, 11]
    assert held(task, task.every_event, 1) == [10, 11, 12]
    baskets = log(*((user, 10 + n, 100 * (n // 4)) for user in range(3) for n in range(16)))
    task = newest(baskets, hold_out, exclude_seen=False)
    assert task.name == "last basket"
    assert cases(task, task.test) == {(u, 22 + n, 300) for u in range(3) for n in range(4)}
    assert cases(task, task.validation) == {(u, 18 + n, 200) for u in range(3) for n in range(4)}
    with pytest.raises(ValueError, match="no user has events to train on"):
        newest(log((0, 1, 1), (0, 2, 2)), hold_out, exclude_seen=True)


def test_global_time_by_hand() -> None:
    """A user has one case from the date on, after all events at earlier times, or none."""
    task = global_time(
        log(
            (0, 1, 10), (0, 2, 40), (0, 3, 90),  # the only event from the date on
            (1, 2, 95), (1, 5, 95), (1, 4, 96),  # a new user: only the last has an earlier event
            (2, 1, 20), (2, 3, 50),  # no event from the date on
            (3, 6, 91),  # no earlier event
        ),
        at=90,
    )  # fmt: skip
    assert cases(task, task.test) == {(0, 3, 90), (1, 4, 96)}
    assert [held(task, task.test.history, user) for user in range(4)] == [[1, 2], [2, 5], [], []]
    assert cases(task, task.validation) <= {(0, 2, 40), (2, 3, 50)}
    assert (task.name, task.date, task.exclude_seen) == ("global-time", 90, True)
    assert len(task.log) == 9


def drawn_times(seed: int = 0) -> Interactions:
    """Twenty users with twenty events each over 50 days, some at one time."""
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, 20, 400), rng.integers(0, 6, 400)
    return Interactions.from_columns(
        users, items, rng.integers(0, 50, 400) * DAY, n_users=20, n_items=6
    )


def test_global_time_trains_before_its_date() -> None:
    """Nine tenths of the events lie before the date; validation users lose those of its last tenth.

    Histories of cases are the user's events at earlier times, as a loop finds them.
    """
    whole = drawn_times()
    task = global_time(whole, seed=3)
    assert task.date is not None
    before = np.sort(whole.timestamps[whole.timestamps < task.date])
    assert np.sort(whole.timestamps)[360] == task.date
    assert task.train.timestamps.max() < task.date
    validation_date = before[int(0.9 * len(before))]
    assert task.validation is not None
    assert validation_date <= task.validation.timestamps.min()
    assert task.validation.timestamps.max() < task.date <= task.test.timestamps.min()
    validated = set(task.validation.users.tolist())
    for user in range(20):
        times = events_of(whole, user).timestamps
        until = validation_date if user in validated else task.date
        assert events_of(task.train, user).timestamps.tolist() == times[times < until].tolist()
        every = events_of(task.every_event, user).timestamps
        assert every.tolist() == times[times < task.date].tolist()
    assert 0 < len(validated) < len(task.test) <= 20
    for part in (task.test, task.validation):
        assert len(set(part.users.tolist())) == len(part)
        for user, item, time in zip(
            part.users.tolist(), part.targets.tolist(), part.timestamps.tolist(), strict=True
        ):
            events = events_of(whole, user)
            seen = [i for i, t in zip(events.items, events.timestamps, strict=True) if t < time]
            assert seen
            assert events_of(part.history, user).items.tolist() == seen
            assert item in events.items[events.timestamps == time]


def test_global_time_never_draws_a_dislike() -> None:
    """A dislike is part of a history, and no target."""
    types = [0, 1, 0, 0, 1]
    whole = Interactions.from_columns(
        [0] * 5, range(5), [1, 2, 3, 9, 10], types=types, n_users=1, n_items=5, dislike_type=1
    )
    for seed in range(20):
        task = global_time(whole, 4, seed=seed)
        assert cases(task, task.test) == {(0, 3, 9)}
        assert held(task, task.test.history, 0) == [0, 1, 2]


@pytest.mark.parametrize("date", [0, 50 * DAY])
def test_global_time_needs_events_on_both_sides(date: int) -> None:
    with pytest.raises(
        ValueError, match="nothing to train on before the date, or no user to test on"
    ):
        global_time(drawn_times(), date)
