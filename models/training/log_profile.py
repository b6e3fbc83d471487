"""What can be told of a log's users: how loud their events are, and whether they come back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.data.row_sets import is_first_occurrence, user_item_keys
from models.evaluation.splits import Holdout, leave_last_basket_out, leave_one_out

_LOUDEST = 10.0  # times the median weight that a target counts at most
_TIED = 2 / 3  # share of events at the time of the one before, from which a log is one of baskets
_EXPECTED = 10.0  # cases of a kind that there would be, so that there being none says something
_REPEATS = 0.01  # share of events on an item its user had before, from which items come again


def target_weights(log: Interactions) -> NDArray[np.float32]:
    """What each event counts as a target, [E]: its weight over the median, at most tenfold.

    What was not liked counts nothing: it is never to be predicted.
    """
    liked = ~log.disliked
    out = np.zeros(len(log), dtype=np.float32)
    if liked.any():
        weights = log.weights[liked]
        out[liked] = np.clip(weights / np.median(weights), 1 / _LOUDEST, _LOUDEST)
    return out


def first_interactions(log: Interactions) -> NDArray[np.bool_]:
    """Which events [E] are on an item that their user did not have before."""
    return is_first_occurrence(user_item_keys(log.users, log.items, log.n_items))


def repeat_share(log: Interactions) -> float:
    """Share of events on an item that their user had before, what was not liked aside."""
    log = log.liked()
    return 1.0 - float(first_interactions(log).mean()) if len(log) else 0.0


def has_repeat_consumption(log: Interactions) -> bool:
    """Whether users come back to items: then what was seen is neither masked nor left out."""
    return repeat_share(log) >= _REPEATS


class PredictionTask(NamedTuple):
    """What a model is asked for, as far as its training has to know."""

    next_basket: bool  # a basket after the last one, never the rest of it
    repeat_consumption: bool  # what a user had may be the answer


def prediction_task(log: Interactions, cases: Holdout | None = None) -> PredictionTask:
    """What a model of a log is asked for: told by the cases that it is judged by.

    In a log of baskets of whose cases hardly any is inside one, a basket is asked for as a whole;
    where users come back, but no case does, only what is new to them. Without cases, or with too
    few to tell, any next event is.
    """
    repeated, tied = repeat_share(log), tied_share(log)
    again = repeated >= _REPEATS
    if cases is None:
        return PredictionTask(False, again)
    inside = int(np.count_nonzero(cases.gaps() == 0))
    baskets = tied >= _TIED and tied * len(cases) >= max(_EXPECTED, 10 * inside)
    if again and repeated * len(cases) >= _EXPECTED:
        n, history = log.n_items, cases.history
        had = user_item_keys(history.users, history.items, n)
        again = bool(np.isin(user_item_keys(cases.users, cases.targets, n), had).any())
    return PredictionTask(baskets, again)


def hold_out(log: Interactions) -> tuple[Interactions, Holdout]:
    """What to train on, and cases to choose by, where nothing else is wanted of the log.

    Each user's last event; in a log of baskets their last basket, for that is what comes next.
    Where most users have but one, as in a log without times, it is no basket.
    """
    test = leave_one_out(log).test
    if tied_share(log) >= _TIED:
        rest, cases = leave_last_basket_out(log)
        if 2 * len(np.unique(cases.users)) >= len(test):
            return rest, cases
    return test.history, test


def tied_share(log: Interactions) -> float:
    """Share of events, each user's first aside, at the very time of the one before."""
    after = np.diff(log.users) == 0
    return float((np.diff(log.timestamps)[after] == 0).mean()) if after.any() else 0.0
