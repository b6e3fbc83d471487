"""Cells of equal size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.clustered.kd_partition import balanced_partition


def within(points: torch.Tensor, clusters: np.ndarray, metric: torch.Tensor) -> float:
    """The mean over rows of the squared distance to the cluster's mean, in a loop."""
    total, count = 0.0, 0
    for cluster in clusters:
        own = points[torch.from_numpy(cluster[cluster >= 0])].double()
        away = own - own.mean(0)
        total += float(((away @ metric.double()) * away).sum())
        count += len(own)
    return total / count


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 300), depth=st.integers(0, 6), seed=st.integers(0, 99))
def test_every_point_is_in_one_cluster_and_clusters_are_of_one_size(
    n: int, depth: int, seed: int
) -> None:
    """Each point is in exactly one cluster, and all clusters have the same number of places."""
    clusters = 1 << min(depth, n.bit_length() - 1)
    points = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    found = balanced_partition(points, clusters)
    assert found.shape == (clusters, -(-n // clusters))
    assert sorted(found[found >= 0].tolist()) == list(range(n))


def test_equal_points_are_divided_too() -> None:
    """Equal points are partitioned completely."""
    found = balanced_partition(torch.zeros(100, 4), 8)
    assert sorted(found[found >= 0].tolist()) == list(range(100))


def test_clusters_are_nested() -> None:
    """Two neighbours of the finer division are one cluster of the wider."""
    points = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    fine, wide = balanced_partition(points, 16), balanced_partition(points, 8)
    for cluster in range(8):
        assert set(fine[2 * cluster]) | set(fine[2 * cluster + 1]) == set(wide[cluster])


def test_clusters_are_tight_where_the_metric_looks() -> None:
    """Clusters are tight along the direction that the metric measures."""
    points = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    metric = torch.zeros(8, 8)
    metric[2, 2] = 1.0
    seen = within(points, balanced_partition(points, 16, metric), metric)
    blind = within(points, balanced_partition(points, 16), metric)
    assert seen < blind / 10
    # Sixteen clusters of one direction: as good as the quantiles of a line can be.
    line = points[:, 2].double().sort().values.view(16, -1)
    assert seen < 1.05 * float((line - line.mean(1, keepdim=True)).square().mean())


@pytest.mark.parametrize("clusters", [0, 3, 12, 128])
def test_a_number_of_clusters_that_cannot_be_is_refused(clusters: int) -> None:
    """A number of clusters that is no power of two, or exceeds the points, is refused."""
    with pytest.raises(
        ValueError, match=f"clusters: must be a power of two of at most 100, got {clusters}"
    ):
        balanced_partition(torch.randn(100, 2), clusters)
