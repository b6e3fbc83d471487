"""Statistics of a log that choose the training objective: weights, repeats and baskets.

All but `first_interactions` are collective over the shards of the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.compute.device import Processes
from models.data.interactions import Interactions, median
from models.data.vocabulary import is_first_occurrence, user_item_keys
from models.evaluation.splits import Holdout, leave_last_basket_out, leave_one_out

_MAX_TARGET_WEIGHT = 10.0  # times the median weight
_BASKET_SHARE = 2 / 3  # of events that share the previous event's time, in a log of baskets
_MIN_EXPECTED = 10.0  # expected cases of a kind, below which their absence is no evidence
_REPEAT_SHARE = 0.01  # of events on an item their user had before, in a log with repeats


def target_weights(log: Interactions) -> NDArray[np.float32]:
    """The weight of each event as a target, [E]: relative to the median, in [0.1, 10].

    Dislikes weigh 0: they are never to be predicted.
    """
    liked = ~log.disliked
    out = np.zeros(len(log), dtype=np.float32)
    if log.shards.any(bool(liked.any())):
        weights = log.weights[liked]
        out[liked] = np.clip(
            weights / median(weights, log.shards), 1 / _MAX_TARGET_WEIGHT, _MAX_TARGET_WEIGHT
        )
    return out


def first_interactions(log: Interactions) -> NDArray[np.bool_]:
    """True [E] for events on an item that their user did not have before."""
    return is_first_occurrence(user_item_keys(log.users, log.items, log.n_items))


def repeat_share(log: Interactions) -> float:
    log = log.liked()
    first = _mean(first_interactions(log), log.shards)
    return 0.0 if first is None else 1.0 - first


def has_repeat_consumption(log: Interactions) -> bool:
    """Report whether users take items again, so that seen items are neither masked nor excluded."""
    return repeat_share(log) >= _REPEAT_SHARE


class PredictionTask(NamedTuple):
    next_basket: bool  # predict the next basket, never the rest of the current one
    repeat_consumption: bool  # items that the user had may be targets


def prediction_task(log: Interactions, cases: Holdout | None = None) -> PredictionTask:
    """Infer the prediction task from a log and the cases that evaluate it.

    A log of baskets with hardly any case inside one is evaluated by whole baskets; a log with
    repeats but no repeated target, only by new items. Without cases, or with too few to tell, the
    task is any next event.
    """
    repeated, tied = repeat_share(log), tied_share(log)
    repeats = repeated >= _REPEAT_SHARE
    if cases is None:
        return PredictionTask(False, repeats)
    count = log.shards.total(len(cases))
    inside = log.shards.total(int(np.count_nonzero(cases.gaps() == 0)))
    next_basket = tied >= _BASKET_SHARE and tied * count >= max(_MIN_EXPECTED, 10 * inside)
    if repeats and repeated * count >= _MIN_EXPECTED:
        repeats = log.shards.any(bool(cases.targets_seen().any()))
    return PredictionTask(next_basket, repeats)


HoldOut = Callable[[Interactions], tuple[Interactions, Holdout]]


def hold_out(log: Interactions) -> tuple[Interactions, Holdout]:
    return hold_out_rule(log)(log)


def hold_out_rule(log: Interactions) -> HoldOut:
    """Choose how events of a log are held out: the question that its service will be asked.

    The cases are each user's last event, or their last basket in a log of baskets. If most users
    have only one basket, as in a log without times, the last event is taken. The rest of a log has
    fewer baskets: it is split by the same rule, so that validation and test ask the same.
    """
    if tied_share(log) >= _BASKET_SHARE:
        _, cases = leave_last_basket_out(log)
        users = log.shards.total(len(np.unique(cases.users)))
        if 2 * users >= log.shards.total(len(leave_one_out(log).test)):
            return leave_last_basket_out
    return _leave_last_event_out


def _leave_last_event_out(log: Interactions) -> tuple[Interactions, Holdout]:
    test = leave_one_out(log).test
    return test.history, test


def without_order(log: Interactions, keys: NDArray[np.uint64]) -> Interactions:
    """Order each user's events by `keys` [E] instead of their times, which become equal.

    The last event of each user is then one at random, and nothing follows another. With keys that
    depend on a user and an item, it stays the same while other users' events change.
    """
    order = np.lexsort((keys, log.users))
    newest = log.shards.max(int(log.timestamps.max(initial=0)))
    return replace(
        log,
        items=log.items[order],
        timestamps=np.full(len(log), newest),
        weights=log.weights[order],
        types=log.types[order],
    )


def imported_first(
    log: Interactions, imported: NDArray[np.bool_], keys: NDArray[np.uint64]
) -> Interactions:
    """Order events [E] with the time of an import by `keys`, before the other ones of their user.

    Their time becomes that of the oldest other event, so that they are nobody's newest.
    """
    oldest = log.shards.min(int(log.timestamps[~imported].min(initial=np.iinfo(np.int64).max)))
    order = np.lexsort((np.where(imported, keys, 0), ~imported, log.users))
    return replace(
        log,
        items=log.items[order],
        timestamps=np.where(imported, oldest, log.timestamps)[order],
        weights=log.weights[order],
        types=log.types[order],
    )


def tied_share(log: Interactions) -> float:
    """The share of events at the time of the user's previous event, first events aside."""
    after = np.diff(log.users) == 0
    return _mean(np.diff(log.timestamps)[after] == 0, log.shards) or 0.0


def _mean(flags: NDArray[np.bool_], shards: Processes) -> float | None:
    """The share of flags [n] that are set in all shards; None without flags."""
    total = shards.total(len(flags))
    return shards.total(int(np.count_nonzero(flags))) / total if total else None
