"""Protocols of benchmarks, which split a log into a task, and slices of its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.data.vocabulary import is_first_occurrence, user_item_keys
from models.evaluation.full_ranking import CaseValues, popularity_weights
from models.evaluation.splits import Holdout, leave_one_out

HSTU_MAX_SEEN = 200  # newest events whose items are excluded as seen by HSTU's protocol
_SPLIT_QUANTILE = 0.9  # of the timestamps, the default date of a time split
_VALIDATION_FRACTION = 4  # one user in this many of a time split is held out for validation


_SECOND = 1_000_000  # microseconds
_DAY = 86_400 * _SECOND

# Upper bounds, inclusive; the last group has no bound.
_GAPS = {
    "0 s": 0,
    "up to 1 minute": 60 * _SECOND,
    "up to 1 hour": 3600 * _SECOND,
    "up to 1 day": _DAY,
    "over 1 day": None,
}
_LENGTHS = {"up to 10 events": 10, "up to 50": 50, "up to 200": 200, "over 200": None}
_AGES = {
    "first event later": -1,  # never in a split by time
    "up to 7 days": 7 * _DAY,
    "up to 30 days": 30 * _DAY,
    "up to 1 year": 365 * _DAY,
    "over 1 year": None,
}


class EvaluationTask(NamedTuple):
    """A split of a log with its ranking rules. Items are renumbered; `items` maps them back."""

    name: str
    items: NDArray[np.int64]  # [N] item rows of the original log
    log: Interactions  # all events, the test cases included
    train: Interactions
    validation: Holdout | None  # None: nothing is tuned, epochs are fixed in advance
    every_event: Interactions  # but for the test cases: training events and validation cases
    test: Holdout
    exclude_seen: bool
    max_seen: int | None = None  # newest events of a user that count as seen; None = all
    date: int | None = None  # microseconds UTC; nothing is trained on from then on


def leave_one_out_5_core(log: Interactions) -> EvaluationTask:
    """Leave-one-out over the 5-core: each user's last event tests, the one before validates.

    The protocol of SASRec's reference code (Kang & McAuley 2018), over the full ranking. Raises
    ValueError for an empty 5-core.
    """
    keep = k_core(log, 5)
    if not keep.any():
        raise ValueError("no users and items have five events each: there is nothing to compare")
    items, small = _renumbered(log.where(keep))
    split = leave_one_out(small)
    return EvaluationTask(
        name="leave-one-out",
        items=items,
        log=small,
        train=split.train,
        validation=split.validation,
        every_event=split.test.history,
        test=split.test,
        exclude_seen=True,
    )


def leave_one_out_hstu(log: Interactions) -> EvaluationTask:
    """Leave-one-out over all items and users: the last event tests, the rest trains.

    The protocol of HSTU's code (Zhai et al. 2024): the newest `HSTU_MAX_SEEN` events count as seen.
    """
    items, small = _renumbered(log)
    split = leave_one_out(small)
    history = split.test.history
    return EvaluationTask(
        name="hstu",
        items=items,
        log=small,
        train=history,
        validation=None,
        every_event=history,
        test=split.test,
        exclude_seen=True,
        max_seen=HSTU_MAX_SEEN,
    )


def newest(
    log: Interactions,
    hold_out: Callable[[Interactions], tuple[Interactions, Holdout]],
    *,
    exclude_seen: bool,
) -> EvaluationTask:
    """Test on what `hold_out` takes of a log, and validate on what it takes of the rest.

    With the function by which a training validates, a model is tested as it was validated.

    Args:
        log: the events, over all users and items.
        hold_out: splits a log into training events and each user's newest, by event or by basket.
        exclude_seen: leave out the items of the user's history; False where items are taken again.

    Raises:
        ValueError: no user has enough events.
    """
    items, small = _renumbered(log)
    every_event, test = hold_out(small)
    train, validation = hold_out(every_event)
    if not len(test) or not len(validation):
        raise ValueError("no user has events to train on, to validate on and to test on")
    is_basket = len(test) > len(np.unique(test.users))
    name = "last basket" if is_basket else "last event"
    return EvaluationTask(
        name=name,
        items=items,
        log=small,
        train=train,
        validation=validation,
        every_event=every_event,
        test=test,
        exclude_seen=exclude_seen,
    )


def of_new_items(task: EvaluationTask) -> EvaluationTask | None:
    """Return the same split with seen items excluded, over the cases with a new item as target.

    That is the other question of a log whose users take items again. Returns None for a task that
    excludes seen items itself, and for one without such cases.
    """
    if task.exclude_seen or not len(test := task.test.new_to_user()):
        return None
    validation = task.validation and task.validation.new_to_user()
    return task._replace(
        name=f"{task.name}, new items", test=test, validation=validation, exclude_seen=True
    )


def global_time(
    log: Interactions, at: int | None = None, *, seed: int = 0, exclude_seen: bool = True
) -> EvaluationTask:
    """Train before a date, and test on one drawn event of each user from that date on.

    The global temporal split with random targets of Gusak et al. 2025: no model learns from what
    follows a request, as it does in leave-one-out. The history is what a service would have at
    the time of the target, later than the date included. A quarter of the users that can be
    validated on are, in the same way, by the events after nine tenths of those before the date.

    Targets and candidates may be items without an event before the date. All rankers are judged
    on them, and `models.evaluation.splits` counts them.

    Args:
        at: the date, microseconds UTC; by default nine tenths of the events come before it.
        seed: of the draw of targets and of validation users.
        exclude_seen: leave out the items of the user's history; False where items are taken again.

    Raises:
        ValueError: no events before the date, or no cases from it on.
    """
    items, small = _renumbered(log)
    at = time_quantile(small, _SPLIT_QUANTILE) if at is None else at
    before = small.where(small.timestamps < at)
    rng = np.random.default_rng(seed)
    test = hold_one_each(small, at, rng)
    if not len(before) or not len(test):
        raise ValueError(
            "nothing to train on before the date, or no user to test on from then on: a test "
            "needs an event later than the first of its user"
        )
    validation_at = time_quantile(before, _SPLIT_QUANTILE)
    validation = hold_one_each(before, validation_at, rng)
    train, validation = _hold_out_users(before, validation, validation_at, rng)
    return EvaluationTask(
        name="global-time",
        items=items,
        log=small,
        train=train,
        validation=validation,
        every_event=before,
        test=test,
        exclude_seen=exclude_seen,
        date=at,
    )


def next_basket(
    log: Interactions, at: int | None = None, *, new_only: bool = False
) -> EvaluationTask:
    """Test on every item of each user's first basket from a date on.

    A basket is the set of items with one timestamp. With `new_only` it has only the items that its
    user did not have before the date, and seen items are no candidates.

    For validation, some users are held out at a second date. The others are trained on up to the
    test: items are seasonal, and a served model has seen the latest events.

    Args:
        log: the events.
        at: the date, microseconds UTC; by default nine tenths of the events come before it.
        new_only: the question is only of new items.
    """
    items, small = _renumbered(log)
    at = time_quantile(log, _SPLIT_QUANTILE) if at is None else at
    before, test = _first_basket(small, at, new_only=new_only)
    validation_at = time_quantile(before, _SPLIT_QUANTILE)
    _, validation = _first_basket(before, validation_at, new_only=new_only)
    rng = np.random.default_rng(0)
    train, cases = _hold_out_users(before, validation, validation_at, rng)
    return EvaluationTask(
        name="next new item" if new_only else "next basket",
        items=items,
        log=small,
        train=train,
        validation=replace(cases, history=train),
        every_event=before,
        test=test,
        exclude_seen=new_only,
        date=at,
    )


def _hold_out_users(
    log: Interactions, cases: Holdout, at: int, rng: np.random.Generator
) -> tuple[Interactions, Holdout]:
    """Draw a quarter of the users with cases: keep these cases, and drop their events from `at`."""
    users = np.unique(cases.users)
    held_out = np.zeros(log.n_users, dtype=np.bool_)
    held_out[rng.permutation(users)[: -(-len(users) // _VALIDATION_FRACTION)]] = True
    train = log.where((log.timestamps < at) | ~held_out[log.users])
    return train, cases.where(held_out[cases.users])


def _first_basket(log: Interactions, at: int, *, new_only: bool) -> tuple[Interactions, Holdout]:
    """Hold out each user's first basket from a date on, every item once."""
    train, cases = time_split(log, at)
    if new_only:
        seen = user_item_keys(train.users, train.items, log.n_items)
        cases = cases.where(~np.isin(user_item_keys(cases.users, cases.targets, log.n_items), seen))
    first = np.full(log.n_users, np.iinfo(np.int64).max)
    np.minimum.at(first, cases.users, cases.timestamps)
    basket = cases.where(cases.timestamps == first[cases.users])
    return train, basket.where(
        is_first_occurrence(user_item_keys(basket.users, basket.targets, log.n_items))
    )


def _renumbered(log: Interactions) -> tuple[NDArray[np.int64], Interactions]:
    """Leave out items and users without events; returns the old item rows and the new log."""
    users, items = np.unique(log.users), np.unique(log.items)
    small = Interactions.from_columns(
        np.searchsorted(users, log.users),
        np.searchsorted(items, log.items),
        log.timestamps,
        log.weights,
        log.types,
        n_users=len(users),
        n_items=len(items),
        dislike_type=log.dislike_type,
    )
    return items.astype(np.int64), small


def time_split(log: Interactions, at: int) -> tuple[Interactions, Holdout]:
    """Train on the events before `at` (microseconds) and hold out those from then on.

    Every event from `at` on is a case if its user has one before, and sees only the history
    before `at`. Dislikes are no cases. For a validation part too, split the returned log again at
    an earlier time.
    """
    past = log.timestamps < at
    train = log.where(past)
    case = ~past & ~log.disliked & np.repeat(train.lengths > 0, log.lengths)
    return train, Holdout(log.users[case], log.items[case], log.timestamps[case], train)


def hold_one_each(log: Interactions, at: int, rng: np.random.Generator) -> Holdout:
    """Draw one liked event from `at` (microseconds) on as the case of each user.

    A user sees the events at earlier times than the target, those from `at` on included. Users
    without such an event after an earlier one have no case, and no history.
    """
    first = log.timestamps[log.offsets[log.users]]  # [E] of the event's user
    eligible = (log.timestamps >= at) & (log.timestamps > first) & ~log.disliked
    drawn = rng.permutation(np.flatnonzero(eligible))
    users, rows = np.unique(log.users[drawn], return_index=True)
    events = drawn[rows]
    until = np.full(log.n_users, np.iinfo(np.int64).min)
    until[users] = log.timestamps[events]
    history = log.where(log.timestamps < until[log.users])
    return Holdout(users, log.items[events], log.timestamps[events], history)


def time_quantile(log: Interactions, share: float) -> int:
    """Return the time before which about `share` of all events lie, for `time_split`.

    Raises ValueError for an empty log.
    """
    if not len(log):
        raise ValueError("an empty log has no times")
    place = min(int(share * len(log)), len(log) - 1)
    return int(np.partition(log.timestamps, place)[place])


def k_core(log: Interactions, minimum: int) -> NDArray[np.bool_]:
    """Mark the events [E] of the k-core: every user and item left has at least `minimum` events.

    Dropping an item can leave a user with too few events and vice versa, so the rule is applied
    until nothing changes.
    """
    columns = (log.items, log.n_items), (log.users, log.n_users)
    keep = np.ones(len(log), dtype=np.bool_)
    while True:
        kept = int(keep.sum())
        for column, size in columns:
            keep &= np.bincount(column[keep], minlength=size)[column] >= minimum
        if int(keep.sum()) == kept:
            return keep


class Slice(NamedTuple):
    """A weighting of the cases: a metric of the slice is sum(w * v) / sum(w)."""

    by: str  # the property of the cases
    label: str  # its values in this slice
    weights: CaseValues  # [M], 0 outside the slice

    @property
    def n_cases(self) -> int:
        return int(np.count_nonzero(self.weights))


def slice_cases(train: Interactions, cases: Holdout) -> list[Slice]:
    """Slice the cases of a model that was trained on `train`; slices without cases are left out.

    The gap is the time from the newest event of the history to the target, and the age of an item
    the time from its first event in training to the target. Slices of one property exclude each
    other.
    """
    counts = train.liked().item_counts()[cases.targets]
    gaps = cases.gaps()
    first = np.full(train.n_items, np.iinfo(np.int64).max)
    np.minimum.at(first, train.items, train.timestamps)
    trained = train.item_counts()[cases.targets] > 0
    ages = cases.timestamps - first[cases.targets]
    found = [
        Slice("all", "all cases", np.ones(len(cases))),
        Slice("all", "popularity-debiased", popularity_weights(counts)),
        *_bins("gap to the target", gaps, _GAPS, gaps >= 0),
        *_bins("history", cases.history.lengths[cases.users], _LENGTHS),
        *_bins("age of the item", ages, _AGES, trained),
        Slice("age of the item", "not in training", (~trained).astype(np.float64)),
    ]
    return [each for each in found if each.n_cases]


def _bins(
    by: str,
    values: NDArray[np.int64],
    bounds: dict[str, int | None],
    known: NDArray[np.bool_] | bool = True,
) -> Iterator[Slice]:
    """Cut the `known` cases by the smallest bound that is at least their value."""
    edges = [bound for bound in bounds.values() if bound is not None]
    places = np.searchsorted(edges, values)
    for place, label in enumerate(bounds):
        yield Slice(by, label, (known & (places == place)).astype(np.float64))
