"""Recent popularity of items at any time of a log, with exponential decay.

    x_c(t) = log (n_c(t) + 1) / (n(t) + 1),  n_c(t) = Σ 2^-(age / half-life)

over the events on c before the day of t, n the mean of n_c over the items. Events of the same day
are excluded, so that no target counts towards its own prediction.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions

HALF_LIVES = (7.0, 30.0)  # days
DAY = 86_400_000_000  # microseconds
MAX_ENTRIES = 2**24  # of one half-life's table: in a larger log a step is longer than a day
_MAX_TIME = 2**62  # microseconds: beyond all times
_BLOCK = 2**20  # counts of items by step at once


class RecentPopularity:
    """Tables of the recent popularity of a log's items, one row for each step of a day or more."""

    def __init__(self, log: Interactions, device: torch.device | None = None) -> None:
        log = log.liked()
        times, shards = log.timestamps, log.shards
        some = shards.any(len(times) > 0)
        self._first = shards.min(int(times.min(initial=_MAX_TIME))) if some else 0
        span = shards.max(int(times.max(initial=-_MAX_TIME))) - self._first if some else 0
        max_steps = max(2, MAX_ENTRIES // (log.n_items + 1))
        self._step = max(DAY, -(-span // (max_steps - 1)))
        steps = span // self._step + 2
        tables = np.empty((len(HALF_LIVES), steps, log.n_items + 1), dtype=np.float32)
        decays = [0.5 ** (self._step / (days * DAY)) for days in HALF_LIVES]
        decayed = np.zeros((len(HALF_LIVES), log.n_items + 1))  # n_c
        by_step = _counts_by_step(log, (times - self._first) // self._step, steps)
        for at, counts in enumerate(by_step):
            for row, decay in enumerate(decays):
                own = decayed[row]
                mean = own[:-1].mean() if log.n_items else 0.0
                tables[row, at] = np.log((own + 1) / (mean + 1))
                own[:-1] += counts
                own *= decay
        self._tables = torch.from_numpy(tables).to(device)

    def steps(self, times: Tensor) -> Tensor:
        """The steps, for `scores`, of times int64 [...] in microseconds."""
        last = self._tables.shape[1] - 1
        return ((times - self._first) // self._step).clamp(0, last)

    def scores(self, steps: Tensor, rows: Tensor) -> Tensor:
        """Popularities x of items [C] at steps [n]: [half-lives, n, C]; row -1 is a new item."""
        return self._tables[:, steps][:, :, rows]

    @property
    def latest(self) -> Tensor:
        """Popularities x at the end of the log, [half-lives, N + 1]; the last is a new item's."""
        return self._tables[:, -1].clone()


def _counts_by_step(
    log: Interactions, step: NDArray[np.int64], steps: int
) -> Iterator[NDArray[np.int64]]:
    """The number of events of each item [items] at each step, in all shards."""
    order = np.argsort(step, kind="stable")
    edges = np.searchsorted(step[order], np.arange(1, steps))
    by_step = np.split(log.items[order], edges)
    width = max(1, _BLOCK // max(1, log.n_items))
    for start in range(0, steps, width):
        part = by_step[start : start + width]
        yield from log.shards.sum(
            np.stack([np.bincount(items, minlength=log.n_items) for items in part])
        )
