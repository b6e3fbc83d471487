"""k-d partition: clusters of equal size, points halved repeatedly where they spread the most."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SAMPLE = 256  # points of a cluster from which its widest direction is estimated
_BLOCK = 1 << 22  # floats gathered at once: 16 MiB


@torch.no_grad()
def balanced_partition(
    points: Tensor, clusters: int, metric: Tensor | None = None
) -> NDArray[np.int64]:
    """Put points in clusters of equal size, close ones together.

    Every cluster is cut in two halves of as many points, across the direction in which the spread
    under the metric is largest (a k-d tree along principal axes; McNames 2001). The clusters of any
    power of two are unions of neighbours: cluster c of 2^a holds the clusters 2c and 2c + 1 of
    2^(a + 1). With the second moment E[qqᵀ] of the queries as the metric the spread is the variance
    of scores, and clusters are as tight as those of k-means where it matters.

    Args:
        points: [n, d], finite.
        clusters: how many, a power of two, at most n.
        metric: [d, d], symmetric and positive semidefinite; None = the identity.

    Returns:
        NDArray: rows int64 [clusters, ⌈n / clusters⌉]; -1 fills up where n has no more.

    Raises:
        ValueError: when `clusters` is no power of two, or more than the points.
    """
    n, d = points.shape
    if clusters < 1 or clusters & (clusters - 1) or clusters > n:
        raise ValueError(f"clusters: must be a power of two of at most {n}, got {clusters}")
    size = -(-n // clusters)
    # The last cluster is filled with points that come twice, which are dropped at the end.
    spare = torch.arange(clusters * size - n) * n // max(1, clusters * size - n)
    source = torch.cat([torch.arange(n), spare])
    order = torch.arange(clusters * size)[None]
    root = torch.eye(d)
    if metric is not None:
        values, axes = torch.linalg.eigh(metric)
        root = (axes * values.clamp(min=0).sqrt()) @ axes.mT
    for _ in range(clusters.bit_length() - 1):
        count, width = order.shape
        halves = torch.empty(2 * count, width // 2, dtype=torch.int64)
        step = max(1, _BLOCK // (width * d))
        for at in range(0, count, step):
            block = order[at : at + step]
            halves[2 * at : 2 * (at + len(block))] = _halve(points, source, block, root)
        order = halves
    rows = torch.where(order < n, order, -1)
    return rows.numpy()


def _halve(points: Tensor, source: Tensor, order: Tensor, root: Tensor) -> Tensor:
    """Cut clusters [c, m] into twice as many of half the size, [2c, m / 2].

    root: of the metric, M^½.
    """
    sample = points[source[order[:, :: max(1, order.shape[1] // _SAMPLE)]]]
    sample = sample - sample.mean(1, keepdim=True)
    # The direction v of largest vᵀΣv, with v as long as the metric's root says: of M^½ Σ M^½.
    _, axes = torch.linalg.eigh(root @ (sample.mT @ sample) @ root)
    across = root @ axes[:, :, -1:]  # (c, d, 1)
    along = (points[source[order]] @ across)[:, :, 0]
    half = order.shape[1] // 2
    parted = torch.from_numpy(np.argpartition(along.numpy(), half - 1, axis=1))
    return order.gather(1, parted).view(-1, half)
