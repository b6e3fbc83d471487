"""From how many items on cells answer sooner than attending each: measured on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache, partial

import torch

from models.attention.clustered.cluster_tree import ClusterTree, KVTable
from models.attention.clustered.clustered_attention import attend_all_rows, attend_clusters
from models.history.attention_options import MANY_TARGETS, Crossover

_ROWS = 16_384
_HEADS, _WIDTH = 4, 16  # as the recommender's
_ROUNDS = 5


@cache
@torch.inference_mode()
def measure() -> Crossover:
    """Both ways over the same rows, alternating, once a process; less than a second.

    What cells take does not depend on how many rows they hold, what attending each takes is
    proportional to it: so they cross where the rows times the ratio of both are.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    table = KVTable(normal(_HEADS, _ROWS, _WIDTH), normal(_HEADS, _ROWS, _WIDTH))
    cells = ClusterTree(table, torch.zeros(_HEADS, _ROWS))
    found = []
    for targets in (1, MANY_TARGETS):
        query = 0.1 * normal(_HEADS, targets, _WIDTH)
        ratio = _ratio(
            partial(attend_clusters, cells, query, max_error=math.inf),
            partial(attend_all_rows, cells, query),
        )
        found.append(_ROWS * ratio)
    return Crossover(*found)


def _ratio(first: Callable[[], object], second: Callable[[], object]) -> float:
    """The median of how much longer one takes than the other."""
    ratios = []
    for _ in range(_ROUNDS + 1):
        seconds = []
        for each in (first, second):
            started = time.perf_counter()
            each()
            seconds.append(time.perf_counter() - started)
        ratios.append(seconds[0] / seconds[1])
    return sorted(ratios[1:])[_ROUNDS // 2]  # without the first, which warms up
