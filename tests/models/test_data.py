"""The log and its splits, on a five-user case worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data import (
    Holdout,
    Interactions,
    leave_one_out,
    min_counts,
    time_at,
    time_split,
)

# Arrival order is mixed on purpose; user 1's two events at t=5 tie; user 3 has none.
USERS = [0, 1, 0, 4, 1, 1, 2, 0, 4, 1, 2]
ITEMS = [0, 3, 1, 5, 2, 4, 0, 2, 1, 0, 5]
TIMES = [30, 5, 10, 7, 5, 1, 40, 20, 6, 9, 41]


@pytest.fixture
def log() -> Interactions:
    return Interactions.from_columns(USERS, ITEMS, TIMES, n_users=5, n_items=6)


def sequences(log: Interactions) -> list[list[int]]:
    return [log.user(u).items.tolist() for u in range(log.n_users)]


def test_sorts_by_user_then_time_with_ties_in_the_order_given(log: Interactions) -> None:
    """Histories run oldest first; equal times keep the order in which they came."""
    assert sequences(log) == [[1, 2, 0], [4, 3, 2, 0], [0, 5], [], [1, 5]]
    assert log.user(1).timestamps.tolist() == [1, 5, 5, 9]
    assert log.lengths.tolist() == [3, 4, 2, 0, 2]
    assert log.users.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 4, 4]
    assert log.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1]
    assert log.item_counts().tolist() == [3, 2, 2, 1, 1, 2]


def test_columns_keep_their_rows_together() -> None:
    """Weights and types travel with their event through the sort."""
    log = Interactions.from_columns(
        [1, 0, 1], [2, 1, 0], [9, 5, 3], [0.5, 2.0, 3.0], [7, 8, 9], n_users=2, n_items=3
    )
    assert log.items.tolist() == [1, 0, 2]
    assert log.weights.tolist() == [2.0, 3.0, 0.5]
    assert log.types.tolist() == [8, 9, 7]


def test_columns_have_the_declared_types_and_defaults(log: Interactions) -> None:
    """Missing weights are one, missing types zero, and every column has its own dtype."""
    assert log.weights.tolist() == [1.0] * 11
    assert log.types.tolist() == [0] * 11
    dtypes = [c.dtype for c in (log.items, log.timestamps, log.weights, log.types, log.offsets)]
    assert dtypes == [np.int32, np.int64, np.float32, np.int16, np.int64]


def test_an_empty_log_is_a_log() -> None:
    """No events, no users and no items are all fine."""
    log = Interactions.from_columns([], [], [], n_users=2, n_items=0)
    assert sequences(log) == [[], []]
    assert [len(part) for part in leave_one_out(log)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0, 5], [0, 1], [1, 2]), r"users must lie in \[0, 5\), got 5"),
        (([0, -1], [0, 1], [1, 2]), r"users must lie in \[0, 5\), got -1"),
        (([0, 1], [0, 6], [1, 2]), r"items must lie in \[0, 6\), got 6"),
        (([0, 1], [0], [1, 2]), r"items must be \[2\] like users, got \[1\]"),
        (([0, 1], [0, 1], [1]), r"timestamps must be \[2\]"),
        (([0, 1], [0, 1], [1.5, 2.0]), "timestamps must be whole numbers"),
        (([0, 1], [0, 1 << 40], [1, 2]), "items must fit int32"),
        (([[0, 1]], [0, 1], [1, 2]), "users must be 1-d"),
        (([0, 1], [0, 1], [1, 2], [1.0, np.nan]), "weights must be finite"),
        (([0, 1], [0, 1], [1, 2], [1.0]), r"weights must be \[2\]"),
        (([0, 1], [0, 1], [1, 2], None, [0, 40_000]), "types must fit int16"),
    ],
)
def test_bad_columns_are_named(columns: tuple[list[int], ...], message: str) -> None:
    """A refused column is named, with what was wrong and what is allowed."""
    with pytest.raises(ValueError, match=message):
        Interactions.from_columns(*columns, n_users=5, n_items=6)


def test_a_log_built_by_hand_is_checked(log: Interactions) -> None:
    """Offsets that do not partition the events, and foreign dtypes, are refused."""
    columns = (log.items, log.timestamps, log.weights, log.types)
    with pytest.raises(ValueError, match="offsets must rise from 0"):
        Interactions(*columns, log.offsets[:-1], 6)
    with pytest.raises(ValueError, match=r"items must lie in \[0, 5\), got 5"):
        Interactions(*columns, log.offsets, 5)
    with pytest.raises(ValueError, match="timestamps has 10 rows"):
        Interactions(log.items, log.timestamps[1:], log.weights, log.types, log.offsets, 6)
    with pytest.raises(ValueError, match="items must be 1-d int32"):
        Interactions(
            log.timestamps,  # type: ignore[arg-type]
            log.timestamps,
            log.weights,
            log.types,
            log.offsets,
            6,
        )


def test_unknown_users_are_refused(log: Interactions) -> None:
    """A user outside the log is an IndexError, also when counted from the end."""
    for user in (5, -1):
        with pytest.raises(IndexError, match="5"):
            log.user(user)
        with pytest.raises(IndexError, match="5"):
            log.gather([0, user])


def test_first_last_and_without_last(log: Interactions) -> None:
    """Histories can be cut at either end; short ones become empty or stay whole."""
    assert sequences(log.last(2)) == [[2, 0], [2, 0], [0, 5], [], [1, 5]]
    assert sequences(log.without_last(2)) == [[1], [4, 3], [], [], []]
    assert sequences(log.first(np.array([9, 1, 0, 3, 1]))) == [[1, 2, 0], [4], [], [], [1]]
    assert sequences(log.where(log.items != 0)) == [[1, 2], [4, 3, 2], [5], [], [1, 5]]
    with pytest.raises(ValueError, match="n must be at least 0"):
        log.last(-1)


def test_gather_lays_a_batch_end_to_end(log: Interactions) -> None:
    """A batch of users, with repeats and an empty one, is gathered oldest first."""
    batch, events = log.gather([4, 3, 1, 4])
    assert batch.tolist() == [0, 0, 2, 2, 2, 2, 3, 3]
    assert log.items[events].tolist() == [1, 5, 4, 3, 2, 0, 1, 5]
    batch, events = log.gather([1, 0], last=2)
    assert batch.tolist() == [0, 0, 1, 1]
    assert log.items[events].tolist() == [2, 0, 2, 0]


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


def test_time_split_by_hand(log: Interactions) -> None:
    """Cases are each user's next event from the cut on; nothing later is in the history."""
    train, held = time_split(log, 7)
    assert sequences(train) == [[], [4, 3, 2], [], [], [1]]
    assert (held.users.tolist(), held.targets.tolist()) == ([1, 4], [0, 5])
    assert held.history is train
    assert held.gaps().tolist() == [4, 1]
    assert len(time_split(log, 100)[1]) == 0
    assert len(time_split(log, 0)[1]) == 0


def test_time_split_can_take_every_later_event_and_users_without_a_past(log: Interactions) -> None:
    """With no bound per user and no history demanded, everything from the cut on is a case."""
    _, held = time_split(log, 10, per_user=None, min_history=0)
    assert held.users.tolist() == [0, 0, 0, 2, 2]
    assert held.targets.tolist() == [1, 2, 0, 0, 5]
    assert held.gaps().tolist() == [-1] * 5
    _, held = time_split(log, 10, per_user=2, min_history=0)
    assert held.targets.tolist() == [1, 2, 0, 5]


def test_time_at_cuts_off_the_share_asked_for(log: Interactions) -> None:
    """A share of the events lies before the time returned."""
    assert time_at(log, 0.0) == 1
    assert time_at(log, 1.0) == 41
    assert (log.timestamps < time_at(log, 6 / 11)).sum() == 6
    with pytest.raises(ValueError, match="share must lie in"):
        time_at(log, 1.5)
    with pytest.raises(ValueError, match="no times"):
        time_at(log.last(0), 0.5)


def test_a_holdout_must_fit_its_history(log: Interactions) -> None:
    """Targets outside the catalogue and columns of different lengths are refused."""
    one = np.zeros(1, dtype=np.int32)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 6\)"):
        Holdout(one, one + 6, np.zeros(1, dtype=np.int64), log)
    with pytest.raises(ValueError, match="of one length"):
        Holdout(one, one, np.zeros(2, dtype=np.int64), log)


def test_cases_can_be_selected(log: Interactions) -> None:
    """A selection keeps the history and drops whole cases."""
    _, _, test = leave_one_out(log)
    kept = test.where(test.gaps() > 5)
    assert (kept.users.tolist(), kept.targets.tolist()) == ([0], [0])
    assert kept.history is test.history


def test_min_counts_drops_what_falls_in_turn() -> None:
    """The rare item 9 takes user 2 along, who takes item 1, which takes user 3."""
    users = [0, 0, 1, 1, 2, 2, 3, 3]
    items = [0, 3, 0, 3, 1, 9, 1, 0]
    assert min_counts(users, items, 2).tolist() == [True] * 4 + [False] * 4
    assert min_counts(users, items, 1).all()
    assert not min_counts(users, items, 3).any()
    assert min_counts([], [], 5).tolist() == []
    with pytest.raises(ValueError, match="items must not be negative"):
        min_counts([0], [-1])
    with pytest.raises(ValueError, match="items has 1 rows, users has 2"):
        min_counts([0, 1], [1])


events = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40)


@settings(max_examples=50, deadline=None)
@given(rows=events, minimum=st.integers(0, 4))
def test_min_counts_is_the_largest_set_that_holds(
    rows: list[tuple[int, int]], minimum: int
) -> None:
    """The result equals peeling one offending event at a time, in any order."""
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
    keep = min_counts([u for u, _ in rows], [i for _, i in rows], minimum)
    assert np.flatnonzero(keep).tolist() == left
