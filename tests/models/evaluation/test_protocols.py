"""Training, validation and test parts of each protocol, compared with lists by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from models.data.interactions import Interactions
from models.evaluation.protocols import (
    MAX_SEEN_B,
    EvaluationTask,
    next_basket,
    next_new_item,
    protocol_a,
    protocol_b,
)
from models.evaluation.splits import Holdout
from tests.support.small import events_of


def log(*events: tuple[int, int, int]) -> Interactions:
    """A log of (user, item, time)."""
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


def test_protocol_a_keeps_the_core_and_holds_out_the_last_two() -> None:
    """Items and users below five events are gone; the last event is the test case."""
    task = protocol_a(log(*CORE, (5, 20, 7), (0, 20, 8)))
    assert task.items.tolist() == [10, 11, 12, 13, 14]
    assert task.train.n_users == 5
    assert task.events == 25
    assert cases(task, task.test) == {(u, 10 + (u + 4) % 5, 400 + u) for u in range(5)}
    assert cases(task, task.validation) == {(u, 10 + (u + 3) % 5, 300 + u) for u in range(5)}
    assert held(task, task.train, 2) == [12, 13, 14]
    assert held(task, task.test.history, 2) == [12, 13, 14, 10]
    assert (task.exclude_seen, task.max_seen) == (True, None)


def test_protocol_a_of_nothing() -> None:
    """Without any user and item of five events there is no task."""
    with pytest.raises(ValueError, match="five events"):
        protocol_a(log((0, 0, 1), (1, 0, 2)))


def test_protocol_b_fits_on_everything_but_the_last() -> None:
    """Protocol B trains on all but the last event, without validation, with 200 seen items."""
    task = protocol_b(log((0, 3, 1), (0, 5, 2), (0, 9, 3), (1, 5, 1)))
    assert task.items.tolist() == [3, 5, 9]
    assert task.validation is None
    assert cases(task, task.test) == {(0, 9, 3)}
    assert held(task, task.train, 0) == [3, 5]
    assert held(task, task.train, 1) == [5]
    assert (task.exclude_seen, task.max_seen) == (True, MAX_SEEN_B)


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
    assert held(task, task.test.history, 0) == [1, 2, 1, 3]


def test_next_new_item_by_hand() -> None:
    """Cases are the items new to the user in the first basket from the date on with any.

    What was taken at one time has no first, and counts once.
    """
    task = next_new_item(log(*SHOP), at=90)
    assert cases(task, task.test) == {(0, 4, 90), (1, 6, 97), (1, 3, 97)}
    assert len(task.test) == 3
    assert task.exclude_seen


@pytest.mark.parametrize("make", [next_basket, next_new_item])
def test_validation_users_lose_their_later_events(
    make: Callable[[Interactions], EvaluationTask],
) -> None:
    """A quarter of the users lose training events from the validation date on; others none."""
    rng = np.random.default_rng(0)
    columns = (rng.integers(0, 8, 400), rng.integers(0, 30, 400), rng.integers(0, 1000, 400))
    whole = log(*sorted(zip(*(column.tolist() for column in columns), strict=True)))
    task = make(whole)
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
        assert (
            events_of(task.test.history, user).timestamps.tolist() == times[times < second].tolist()
        )
