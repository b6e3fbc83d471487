"""Popularity of late: what was taken in the last days, as it stood at any time of a log.

    x_c(t) = log (n_c(t) + 1) / (n(t) + 1),  n_c(t) = Σ 2^-(age / half-life)

over the events on c before the day of t, n the mean of n_c over the items. Nothing of the day
itself is in it, so that no target is among what it is foretold from.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions

HALF_LIVES = (7.0, 30.0)  # days
DAY = 86_400_000_000  # microseconds
_MOST = 2**24  # numbers of one half-life: with more, a step is longer than a day


class RecentPopularity:
    """The trends of one log."""

    def __init__(self, log: Interactions, device: torch.device | None = None) -> None:
        log = log.liked()
        times, items = log.timestamps, log.items
        self._first = int(times.min()) if len(times) else 0
        span = int(times.max()) - self._first if len(times) else 0
        most = max(2, _MOST // (log.n_items + 1))  # steps
        self._step = max(DAY, -(-span // (most - 1)))
        place = (times - self._first) // self._step
        steps = int(place.max(initial=0)) + 2
        order = np.argsort(place, kind="stable")
        edges = np.searchsorted(place[order], np.arange(steps + 1))
        taken = [items[order[edges[at] : edges[at + 1]]] for at in range(steps)]
        each = [_decayed(taken, log.n_items, self._kept(days)) for days in HALF_LIVES]
        self._tables = torch.from_numpy(np.stack(each)).to(device)

    def _kept(self, days: float) -> float:
        """What is left of an event after one step."""
        return float(0.5 ** (self._step / (days * DAY)))

    def steps(self, times: Tensor) -> Tensor:
        """The places, for `of`, of times int64 [...] in microseconds."""
        last = self._tables.shape[1] - 1
        return ((times - self._first) // self._step).clamp(0, last)

    def scores(self, places: Tensor, rows: Tensor) -> Tensor:
        """X of items [C] at places [n]: [half-lives, n, C]; row -1 is an item never taken."""
        return self._tables[:, places][:, :, rows]

    @property
    def latest(self) -> Tensor:
        """X at the end of the log, [half-lives, N + 1]; the last is an item never taken."""
        return self._tables[:, -1].clone()


def _decayed(taken: list[NDArray[np.int32]], items: int, kept: float) -> NDArray[np.float32]:
    """X at each step [steps, items + 1], from the items taken in each."""
    out = np.empty((len(taken), items + 1), dtype=np.float32)
    counts = np.zeros(items + 1)
    for at, step in enumerate(taken):
        out[at] = np.log((counts + 1) / (counts[:items].mean() + 1 if items else 1.0))
        counts[:items] += np.bincount(step, minlength=items)
        counts *= kept
    return out
