"""Recent popularity of items at any time of a log, with exponential decay.

    x_c(t) = log (n_c(t) + 1) / (n(t) + 1),  n_c(t) = Σ 2^-(age / half-life)

over the events on c before the day of t, n the mean of n_c over the items. Events of the same day
are excluded, so that no target counts towards its own prediction.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions

HALF_LIVES = (7.0, 30.0)  # days
DAY = 86_400_000_000  # microseconds
MAX_ENTRIES = 2**24  # of one half-life's table: in a larger log a step is longer than a day


class RecentPopularity:
    """Tables of the recent popularity of a log's items, one row for each step of a day or more."""

    def __init__(self, log: Interactions, device: torch.device | None = None) -> None:
        log = log.liked()
        times, items = log.timestamps, log.items
        self._first = int(times.min()) if len(times) else 0
        span = int(times.max()) - self._first if len(times) else 0
        max_steps = max(2, MAX_ENTRIES // (log.n_items + 1))
        self._step = max(DAY, -(-span // (max_steps - 1)))
        step = (times - self._first) // self._step
        steps = int(step.max(initial=0)) + 2
        order = np.argsort(step, kind="stable")
        edges = np.searchsorted(step[order], np.arange(1, steps))
        by_step = np.split(items[order], edges)
        decays = [0.5 ** (self._step / (days * DAY)) for days in HALF_LIVES]
        tables = [_decayed_popularity(by_step, log.n_items, decay) for decay in decays]
        self._tables = torch.from_numpy(np.stack(tables)).to(device)

    def steps(self, times: Tensor) -> Tensor:
        """Return the steps, for `scores`, of times int64 [...] in microseconds."""
        last = self._tables.shape[1] - 1
        return ((times - self._first) // self._step).clamp(0, last)

    def scores(self, steps: Tensor, rows: Tensor) -> Tensor:
        """Return x of items [C] at steps [n]: [half-lives, n, C]; row -1 is a new item."""
        return self._tables[:, steps][:, :, rows]

    @property
    def latest(self) -> Tensor:
        """X at the end of the log, [half-lives, N + 1]; the last column is a new item."""
        return self._tables[:, -1].clone()


def _decayed_popularity(
    by_step: list[NDArray[np.int32]], items: int, decay: float
) -> NDArray[np.float32]:
    """Return x at each step [steps, items + 1], given the items of each step's events."""
    out = np.empty((len(by_step), items + 1), dtype=np.float32)
    counts = np.zeros(items + 1)
    for at, step in enumerate(by_step):
        out[at] = np.log((counts + 1) / (counts[:items].mean() + 1 if items else 1.0))
        counts[:items] += np.bincount(step, minlength=items)
        counts *= decay
    return out
