"""Benchmark tasks: what is fitted on, what is chosen by, what is judged, and what was seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.data.row_sets import is_first_occurrence, user_item_keys
from models.evaluation.splits import Holdout, k_core, leave_one_out, time_quantile, time_split

MAX_SEEN_B = 200  # newest events whose items protocol B leaves out of the ranking
_LATE = 0.9  # share of the events that come before the date of a time split
_HELD = 4  # one in so many users of a time split is held out of training for validation


class EvaluationTask(NamedTuple):
    """One way to hold out and to judge. Items are rows of `items`, the kept ones of the log."""

    name: str
    items: NDArray[np.int64]  # [N] rows of the log that was given
    train: Interactions
    validation: Holdout | None  # None: nothing is chosen, epochs are fixed in advance
    test: Holdout
    exclude_seen: bool
    max_seen: int | None = None  # newest events of a user that count as seen; None = all

    @property
    def events(self) -> int:
        """How many events there are: the newest history's, and the test cases."""
        return len(self.test.history) + len(self.test)


def protocol_a(log: Interactions) -> EvaluationTask:
    """Items and users of five events at least; last event test, the one before validation.

    The protocol of SASRec's reference code (Kang & McAuley 2018), over the full ranking. Raises
    ValueError where nothing is left.
    """
    users = log.users
    keep = k_core(users, log.items, 5)
    if not keep.any():
        raise ValueError("no users and items have five events each: there is nothing to compare")
    items, small = _renumbered(log, keep)
    split = leave_one_out(small)
    return EvaluationTask("A", items, split.train, split.validation, split.test, exclude_seen=True)


def protocol_b(log: Interactions) -> EvaluationTask:
    """All items and users; last event test, everything else training, no validation.

    The protocol of HSTU's code (Zhai et al. 2024): the newest `SEEN_B` events count as seen.
    """
    items, small = _renumbered(log, np.ones(len(log), dtype=np.bool_))
    split = leave_one_out(small)
    history = split.test.history
    return EvaluationTask(
        "B", items, history, None, split.test, exclude_seen=True, max_seen=MAX_SEEN_B
    )


def next_basket(log: Interactions, at: int | None = None) -> EvaluationTask:
    """Judge by every item of each user's first basket from a date on.

    A basket is what a user took at one time. What was taken before may be taken again.

    Args:
        log: the events.
        at: the date, microseconds UTC; by default nine tenths of the events come before it.
    """
    at = time_quantile(log, _LATE) if at is None else at
    items, small = _renumbered(log, np.ones(len(log), dtype=np.bool_))
    before, test = _first_basket(small, at)
    train, validation = _chosen_by(before, _first_basket)
    return EvaluationTask("next basket", items, train, validation, test, exclude_seen=False)


def next_new_item(log: Interactions, at: int | None = None) -> EvaluationTask:
    """Judge by what is new to each user in the first basket from a date on that has such an item.

    A basket is what a user took at one time.
    """
    at = time_quantile(log, _LATE) if at is None else at
    items, small = _renumbered(log, np.ones(len(log), dtype=np.bool_))
    before, test = _first_new(small, at)
    train, validation = _chosen_by(before, _first_new)
    return EvaluationTask("next new item", items, train, validation, test, exclude_seen=True)


def _chosen_by(
    before: Interactions, cases: Callable[[Interactions, int], tuple[Interactions, Holdout]]
) -> tuple[Interactions, Holdout]:
    """What to fit on, and to choose by: some users lose what they did from a second date on.

    Of the others everything up to the test is fitted on. What is in season then is not what was a
    month before, and nobody would serve a model that has not seen it.
    """
    at = time_quantile(before, _LATE)
    _, validation = cases(before, at)
    users = np.unique(validation.users)
    held = np.zeros(before.n_users, dtype=np.bool_)
    drawn = np.random.default_rng(0).permutation(len(users))
    held[users[drawn[: -(-len(users) // _HELD)]]] = True
    train = before.where((before.timestamps < at) | ~held[before.users])
    mine = validation.where(held[validation.users])
    return train, Holdout(mine.users, mine.targets, mine.timestamps, train)


def _first_basket(log: Interactions, at: int) -> tuple[Interactions, Holdout]:
    train, later = time_split(log, at, per_user=None)
    return train, _first_time(later)


def _first_time(cases: Holdout) -> Holdout:
    """The cases at each user's first time, every item once."""
    users = cases.users
    first = np.full(cases.history.n_users, np.iinfo(np.int64).max)
    np.minimum.at(first, users, cases.timestamps)
    basket = cases.where(cases.timestamps == first[users])
    return basket.where(
        is_first_occurrence(user_item_keys(basket.users, basket.targets, cases.history.n_items))
    )


def _first_new(log: Interactions, at: int) -> tuple[Interactions, Holdout]:
    train, later = time_split(log, at, per_user=None)
    had = user_item_keys(train.users, train.items, log.n_items)
    new = later.where(~np.isin(user_item_keys(later.users, later.targets, log.n_items), had))
    return train, _first_time(new)


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
        dislike_type=log.dislike_type,
    )
    return items.astype(np.int64), small
