"""What can be told of a log's users: how loud their events are, and whether they come back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.data import Interactions

_LOUDEST = 10.0  # times the median weight that a target counts at most
_REPEATS = 0.01  # share of events on an item its user had before, from which items come again


def worth(log: Interactions) -> NDArray[np.float32]:
    """What each event counts as a target, [E]: its weight over the median, at most tenfold.

    What was not liked counts nothing: it is never to be predicted.
    """
    liked = ~log.disliked
    out = np.zeros(len(log), dtype=np.float32)
    if liked.any():
        weights = log.weights[liked]
        out[liked] = np.clip(weights / np.median(weights), 1 / _LOUDEST, _LOUDEST)
    return out


def repeats(log: Interactions) -> float:
    """Share of events on an item that their user had before, what was not liked aside."""
    log = log.liked()
    if not len(log):
        return 0.0
    pairs = log.users.astype(np.int64) * log.n_items + log.items
    return 1.0 - len(np.unique(pairs)) / len(pairs)


def returns(log: Interactions) -> bool:
    """Whether users come back to items: then what was seen is neither masked nor left out."""
    return repeats(log) >= _REPEATS
