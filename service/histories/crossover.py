"""The number of items from which clusters are faster than attending each, measured here."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from statistics import median
from timeit import timeit

import torch

from models.attention.clustered.cluster_tree import ClusterTree, KVTable
from models.attention.clustered.clustered_attention import attend_clusters
from models.history.attention_options import MANY_TARGETS, Crossover

_ROWS = 16_384
_HEADS, _WIDTH = 4, 16  # as the recommender's
_ROUNDS = 5


@cache
@torch.inference_mode()
def measure() -> Crossover:
    """Time both over the same rows, alternating, once a process; less than a second.

    The time of clusters does not depend on their number of rows, that of attending each row is
    proportional to it: so they cross at the rows times the ratio of both.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    table = KVTable(normal(_HEADS, _ROWS, _WIDTH), normal(_HEADS, _ROWS, _WIDTH))
    clusters = ClusterTree(table, torch.zeros(_HEADS, _ROWS))
    crossings = []
    for targets in (1, MANY_TARGETS):
        query = 0.1 * normal(_HEADS, targets, _WIDTH)
        ratio = _ratio(
            partial(attend_clusters, clusters, query, max_error=math.inf),
            partial(attend_clusters, clusters, query, max_error=0),
        )
        crossings.append(_ROWS * ratio)
    return Crossover(*crossings)


def _ratio(first: Callable[[], object], second: Callable[[], object]) -> float:
    """The median ratio of the time of the first to that of the second."""
    ratios = [timeit(first, number=1) / timeit(second, number=1) for _ in range(_ROUNDS + 1)]
    return median(ratios[1:])  # without the first, which warms up
