"""Splits, held-out cases and the k-core, on the five-user case worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.interactions import Interactions
from models.evaluation.splits import leave_last_basket_out, leave_one_out
from service.lab.protocols import k_core, time_quantile, time_split
from tests.support.small import events_of, five_users, newest_events, sequences


@pytest.fixture
def log() -> Interactions:
    return five_users()


def test_leave_one_out_by_hand(log: Interactions) -> None:
    """The last event tests, the one before validates, and users below three are trained on."""
    train, validation, test = leave_one_out(log)
    assert sequences(train) == [[1], [4, 3], [0, 5], [], [1, 5]]
    assert validation.users.tolist() == test.users.tolist() == [0, 1]
    assert validation.targets.tolist() == [2, 2]
    assert validation.timestamps.tolist() == [20, 5]
    assert test.targets.tolist() == [0, 0]
    assert test.timestamps.tolist() == [30, 9]
    assert sequences(validation.history) == sequences(train)
    assert sequences(test.history) == [[1, 2], [4, 3, 2], [0, 5], [], [1, 5]]
    assert test.gaps().tolist() == [10, 4]


def test_an_empty_log_splits_into_empty_parts() -> None:
    """No events and no items: nothing to train on, no cases, no error."""
    log = Interactions.from_columns([], [], [], n_users=2, n_items=0)
    assert [len(part) for part in leave_one_out(log)] == [0, 0, 0]


def test_a_dislike_is_never_a_case() -> None:
    """The last liked event is the case, later events are left out, and three likes are needed."""
    users = [0] * 6 + [1] * 3 + [2] * 4
    items = [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3]
    types = [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    log = Interactions.from_columns(
        users, items, range(13), None, types, n_users=3, n_items=6, dislike_type=1
    )
    train, validation, test = leave_one_out(log)
    assert (test.users.tolist(), test.targets.tolist()) == ([0, 2], [4, 3])
    assert test.timestamps.tolist() == [4, 12]
    assert sequences(test.history) == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert (validation.users.tolist(), validation.targets.tolist()) == ([0, 2], [3, 1])
    assert sequences(train) == [[0, 1, 2], [0, 1, 2], [0]]
    _, held = time_split(log, 4)
    assert held.targets.tolist() == [4]


def test_time_split_by_hand(log: Interactions) -> None:
    """Cases are all events from the cut on, of users with one before; no history has them."""
    train, held = time_split(log, 7)
    assert sequences(train) == [[], [4, 3, 2], [], [], [1]]
    assert (held.users.tolist(), held.targets.tolist()) == ([1, 4], [0, 5])
    assert held.history is train
    assert held.gaps().tolist() == [4, 1]
    _, held = time_split(log, 2)
    assert (held.users.tolist(), held.targets.tolist()) == ([1, 1, 1], [3, 2, 0])
    assert held.gaps().tolist() == [4, 4, 8]
    assert len(time_split(log, 100)[1]) == 0
    assert len(time_split(log, 0)[1]) == 0


def test_time_at_cuts_off_the_requested_share(log: Interactions) -> None:
    assert time_quantile(log, 0.0) == 1
    assert time_quantile(log, 1.0) == 41
    assert (log.timestamps < time_quantile(log, 6 / 11)).sum() == 6
    with pytest.raises(ValueError, match="no times"):
        time_quantile(newest_events(log, 0), 0.5)


events = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40)


@settings(max_examples=50, deadline=None)
@given(rows=events, minimum=st.integers(0, 4))
def test_k_core_is_the_largest_set_that_holds(rows: list[tuple[int, int]], minimum: int) -> None:
    rows.sort(key=lambda row: row[0])  # as a log has them: by user
    left = list(range(len(rows)))
    while True:
        bad = [
            e
            for e in left
            if any(sum(rows[o][side] == rows[e][side] for o in left) < minimum for side in (0, 1))
        ]
        if not bad:
            break
        left.remove(bad[0])
    users, items = ([row[side] for row in rows] for side in (0, 1))
    log = Interactions.from_columns(users, items, range(len(rows)), n_users=4, n_items=5)
    assert np.flatnonzero(k_core(log, minimum)).tolist() == left


def test_leave_last_basket_out_by_hand() -> None:
    """The distinct liked items of a user's last basket are cases; earlier events remain."""
    events = [
        (0, 1, 10), (0, 2, 10), (0, 3, 20), (0, 4, 20), (0, 3, 20),  # a basket of two
        (1, 1, 10), (1, 2, 10), (1, 3, 10),  # one basket alone
        (2, 5, 10), (2, 6, 20),  # two events
        (3, 1, 10), (3, 2, 20), (3, 4, 20), (3, 3, 30), (3, 5, 30),  # the last is a dislike
    ]  # fmt: skip
    users, items, times = zip(*events, strict=True)
    types = np.zeros(len(events), dtype=np.int16)
    types[-2:] = 1
    log = Interactions.from_columns(
        users, items, times, types=types, n_users=5, n_items=7, dislike_type=1
    )
    rest, cases = leave_last_basket_out(log)
    found = zip(
        cases.users.tolist(), cases.targets.tolist(), cases.timestamps.tolist(), strict=True
    )
    assert sorted(found) == [(0, 3, 20), (0, 4, 20), (3, 2, 20), (3, 4, 20)]
    left = [events_of(rest, user).items.tolist() for user in range(5)]
    assert left == [[1, 2], [1, 2, 3], [5, 6], [1], []]
    assert (cases.gaps() > 0).all()
    nothing = Interactions.from_columns([], [], [], n_users=2, n_items=3)
    assert [len(part) for part in leave_last_basket_out(nothing)] == [0, 0]
