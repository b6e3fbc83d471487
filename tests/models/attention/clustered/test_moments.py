"""Moments of clusters against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import torch

from models.attention.clustered.moments import (
    Moments,
    merge_neighbours,
    moments_from_sums,
    quadratic_features,
    sums_from_moments,
    sums_from_rows,
)

D, WIDE = 4, 3


def rows(
    clusters: int, size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values that go with them, and weights of clusters."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(clusters, size, D, generator=generator) + 3
    values = keys[..., :WIDE] + torch.randn(clusters, size, WIDE, generator=generator)
    return keys, values, torch.rand(clusters, size, generator=generator)


def loop(keys: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> Moments:
    """The definition, cluster by cluster."""
    found = []
    every = (part.numpy().astype(np.float64) for part in (keys, values, weights))
    for k, v, w in zip(*every, strict=True):
        mean, value = np.average(k, 0, w), np.average(v, 0, w)
        square = np.cov(k.T, aweights=w, ddof=0)
        cross = ((v - value) * w[:, None]).T @ (k - mean) / w.sum()
        spread = np.trace(np.cov(v.T, aweights=w, ddof=0))
        found.append(
            (
                w.sum(),
                np.concatenate([mean, square[np.triu_indices(D)]]),
                np.concatenate([value, cross.ravel()]),
                spread,
                (w**2).sum(),
            )
        )
    return Moments(*(torch.tensor(np.array(part)) for part in zip(*found, strict=True)))


def close(found: Moments, wanted: Moments, tolerance: float = 1e-5) -> None:
    """Every part agrees."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


def test_moments_are_those_of_the_definition() -> None:
    """Weighted means, covariances and cross-covariances of each cluster."""
    found = rows(5, 40)
    close(
        moments_from_sums(sums_from_rows(*found, torch.full((D,), 2.5)), torch.full((D,), 2.5)),
        loop(*found),
    )


def test_sums_come_back_from_moments() -> None:
    """Sums recovered from moments equal the original sums."""
    about = torch.full((D,), 2.5)
    sums = sums_from_rows(*rows(5, 40), about)
    for one, other in zip(
        sums_from_moments(moments_from_sums(sums, about), about), sums, strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


def test_two_merged_clusters_are_the_cluster_of_both() -> None:
    """Neighbours put together have the moments of all their rows."""
    keys, values, weights = rows(6, 20)
    about = torch.full((D,), 2.5)
    found = merge_neighbours(
        moments_from_sums(sums_from_rows(keys, values, weights, about), about), about
    )
    both = loop(keys.reshape(3, 40, D), values.reshape(3, 40, WIDE), weights.reshape(3, 40))
    close(found, both)


def test_an_empty_cluster_has_no_mass_and_nothing_else() -> None:
    """A cluster without weight has moments of zero, never NaN."""
    keys, values, _ = rows(2, 10)
    found = moments_from_sums(
        sums_from_rows(keys, values, torch.zeros(2, 10), torch.zeros(D)), torch.zeros(D)
    )
    for part in found:
        assert torch.equal(part, torch.zeros_like(part))


def test_the_expansion_is_exact_for_normal_keys() -> None:
    """Where scores are normal in a cluster, n e^(q·k̄ + qᵀΣq/2) (v̄ + Cq) is the sum itself."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 400_000, D, generator=generator) * 0.4
    values = keys[..., :WIDE] * 2 + 1
    found = moments_from_sums(
        sums_from_rows(keys, values, torch.ones(1, 400_000), torch.zeros(D)), torch.zeros(D)
    )
    query = torch.tensor([0.9, -0.4, 0.3, 0.2])
    terms = (keys[0].double() @ query.double()).exp()
    mass = found.weight * math.exp(
        float(found.keys[0, :D] @ query + quadratic_features(query) @ found.keys[0, D:] / 2)
    )
    context = found.values[0, :WIDE] + found.values[0, WIDE:].view(WIDE, D) @ query
    torch.testing.assert_close(mass[0].double(), terms.sum(), rtol=2e-3, atol=0)
    wanted = (terms[:, None] * values[0]).sum(0) / terms.sum()
    torch.testing.assert_close(context.double(), wanted, rtol=5e-3, atol=0)


def test_products_are_the_quadratic_form() -> None:
    """qᵀΣq by the upper triangle of Σ alone."""
    query = torch.randn(7, D)
    root = torch.randn(D, D)
    square = root @ root.T
    first, second = torch.triu_indices(D, D)
    torch.testing.assert_close(
        quadratic_features(query) @ square[first, second], ((query @ square) * query).sum(1)
    )
