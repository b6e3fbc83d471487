"""Benchmark tasks: what is fitted on, what is chosen by, what is judged, and what was seen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data import Interactions
from models.splits import Holdout, leave_one_out, min_counts, time_at

SEEN_B = 200  # newest events whose items protocol B leaves out of the ranking
_LATE = 0.9  # share of the events that come before the date of a time split


class Task(NamedTuple):
    """One way to hold out and to judge. Items are rows of `items`, the kept ones of the log."""

    name: str
    items: NDArray[np.int64]  # [N] rows of the log that was given
    train: Interactions
    validation: Holdout | None  # None: nothing is chosen, epochs are fixed in advance
    test: Holdout
    exclude_seen: bool
    seen: int | None = None  # newest events of a user that count as seen; None = all

    @property
    def events(self) -> int:
        """How many events there are: the newest history's, and the test cases."""
        return len(self.test.history) + len(self.test)


def protocol_a(log: Interactions) -> Task:
    """Items and users of five events at least; last event test, the one before validation.

    The protocol of SASRec's reference code (Kang & McAuley 2018), over the full ranking. Raises
    ValueError where nothing is left.
    """
    users = log.users
    keep = min_counts(users, log.items, 5)
    if not keep.any():
        raise ValueError("no users and items have five events each: there is nothing to compare")
    items, small = _renumbered(log, keep)
    split = leave_one_out(small)
    return Task("A", items, split.train, split.validation, split.test, exclude_seen=True)


def protocol_b(log: Interactions) -> Task:
    """All items and users; last event test, everything else training, no validation.

    The protocol of HSTU's code (Zhai et al. 2024): the newest `SEEN_B` events count as seen.
    """
    items, small = _renumbered(log, np.ones(len(log), dtype=np.bool_))
    split = leave_one_out(small)
    history = split.test.history
    return Task("B", items, history, None, split.test, exclude_seen=True, seen=SEEN_B)


def next_basket(log: Interactions, at: int | None = None) -> Task:
    """Judge by every item of each user's first basket from a date on.

    A basket is what a user took at one time. What was taken before may be taken again.

    Args:
        log: the events.
        at: the date, microseconds UTC; by default nine tenths of the events come before it.
    """
    at = time_at(log, _LATE) if at is None else at
    items, small = _renumbered(log, np.ones(len(log), dtype=np.bool_))
    before, test = _first_basket(small, at)
    # What is fitted on ends before the validation cases, as it does in the other protocols.
    train, validation = _first_basket(before, time_at(before, _LATE))
    return Task("next basket", items, train, validation, test, exclude_seen=False)


def next_new(log: Interactions, at: int | None = None) -> Task:
    """Judge by each user's first item from a date on that they never had."""
    at = time_at(log, _LATE) if at is None else at
    items, small = _renumbered(log, np.ones(len(log), dtype=np.bool_))
    before, test = _first_new(small, at)
    train, validation = _first_new(before, time_at(before, _LATE))
    return Task("next new item", items, train, validation, test, exclude_seen=True)


def _first_basket(log: Interactions, at: int) -> tuple[Interactions, Holdout]:
    train, later = _later(log, at)
    first = np.full(log.n_users, np.iinfo(np.int64).max)
    np.minimum.at(first, log.users[later], log.timestamps[later])
    cases = later[log.timestamps[later] == first[log.users[later]]]
    _, once = np.unique(_pairs(log)[cases], return_index=True)
    return train, _cases(log, cases[np.sort(once)], train)


def _first_new(log: Interactions, at: int) -> tuple[Interactions, Holdout]:
    train, later = _later(log, at)
    cases = later[~np.isin(_pairs(log)[later], _pairs(train))]
    _, first = np.unique(log.users[cases], return_index=True)
    return train, _cases(log, cases[first], train)


def _later(log: Interactions, at: int) -> tuple[Interactions, NDArray[np.int64]]:
    """The log before the date, and the events after it of users who have some before."""
    past = log.timestamps < at
    train = log.where(past)
    known = train.lengths[log.users] > 0
    return train, np.flatnonzero(~past & known)


def _cases(log: Interactions, events: NDArray[np.int64], history: Interactions) -> Holdout:
    return Holdout(log.users[events], log.items[events], log.timestamps[events], history)


def _pairs(log: Interactions) -> NDArray[np.int64]:
    return log.users.astype(np.int64) * log.n_items + log.items


def _renumbered(
    log: Interactions, keep: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], Interactions]:
    """The rows of the items that are left, and the log over them and the users that are left."""
    users, items = np.unique(log.users[keep]), np.unique(log.items[keep])
    small = Interactions.from_columns(
        np.searchsorted(users, log.users[keep]),
        np.searchsorted(items, log.items[keep]),
        log.timestamps[keep],
        log.weights[keep],
        log.types[keep],
        n_users=len(users),
        n_items=len(items),
    )
    return items.astype(np.int64), small
