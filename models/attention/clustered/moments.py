"""Moments of clusters: enough of their rows to attend to all of them by one expansion.

A cluster has rows of weights w_i, keys k_i and values v_i. With n = Σ w_i, weighted means k̄ and v̄,
covariance Σ of the keys and cross-covariance C = Cov(v, k), a query gives, by q' = q / √d,

    Σ w_i e^(q'·k_i)      ≈ n e^(q'·k̄ + q'ᵀΣq'/2)
    Σ w_i e^(q'·k_i) v_i  ≈ n e^(q'·k̄ + q'ᵀΣq'/2) (v̄ + C q')

exact for keys and values that are jointly normal in the cluster, and else up to third order in the
spread of the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Moments of C clusters; the leading dimensions may hold heads too.

    weight: [..., C] Σ w.
    keys: [..., C, d + d (d + 1) / 2] the mean key, then the upper triangle of Σ.
    values: [..., C, d_v + d_v · d] the mean value, then C row by row.
    spread: [..., C] the trace of Cov(v).
    squares: [..., C] Σ w².
    """

    weight: Tensor
    keys: Tensor
    values: Tensor
    spread: Tensor
    squares: Tensor


class MomentSums(NamedTuple):
    """Sums of C clusters about an origin that all share: before dividing, so that they add up.

    outer: [C, 1 + d, 1 + d + d_v] Σ w [1, δ] [1, δ, v]ᵀ with δ = k - origin.
    lengths: [C] Σ w |v|².
    squares: [C] Σ w².
    """

    outer: Tensor
    lengths: Tensor
    squares: Tensor


def sums_from_rows(keys: Tensor, values: Tensor, weights: Tensor, origin: Tensor) -> MomentSums:
    """Sum up clusters of B rows each: keys [C, B, d], values [C, B, d_v], weights [C, B].

    origin: [d], a point near the keys, so that little is lost to rounding.
    """
    centred = keys - origin
    one = torch.ones_like(centred[..., :1])
    left = torch.cat([one, centred], -1) * weights[..., None]
    outer = left.mT @ torch.cat([one, centred, values], -1)
    return MomentSums(outer, (weights * values.square().sum(-1)).sum(-1), weights.square().sum(-1))


def moments_from_sums(sums: MomentSums, origin: Tensor) -> Moments:
    """Compute moments from sums about an origin [d]; an empty cluster has zeros."""
    outer, d = sums.outer, sums.outer.shape[1] - 1
    weight = outer[:, 0, 0].clamp(min=0)
    # An emptied cluster may be left with a weight of rounding errors: it counts for nothing.
    means = outer / weight.clamp(min=1e-30)[:, None, None]
    key, value = means[:, 0, 1 : 1 + d], means[:, 0, 1 + d :]
    covariance = means[:, 1:, 1 : 1 + d] - key[:, :, None] * key[:, None]
    cross = means[:, 1:, 1 + d :].mT - value[:, :, None] * key[:, None]  # (C, d_v, d)
    spread = sums.lengths / weight.clamp(min=1e-30) - value.square().sum(-1)
    first, second = torch.triu_indices(d, d)
    present = (weight > 0)[:, None]
    return Moments(
        weight,
        torch.cat([key + origin, covariance[:, first, second]], 1) * present,
        torch.cat([value, cross.flatten(1)], 1) * present,
        spread.clamp(min=0) * present[:, 0],
        sums.squares,
    )


def sums_from_moments(moments: Moments, origin: Tensor) -> MomentSums:
    """Invert `moments_from_sums` about an origin [d]."""
    d = len(origin)
    width = moments.values.shape[-1] // (1 + d)
    key, value = moments.keys[:, :d] - origin, moments.values[:, :width]
    covariance = torch.zeros(len(moments.weight), d, d)
    first, second = torch.triu_indices(d, d)
    covariance[:, first, second] = moments.keys[:, d:]
    covariance[:, second, first] = moments.keys[:, d:]
    cross = moments.values[:, width:].view(-1, width, d)
    one = torch.ones_like(key[:, :1])
    outer = torch.cat([one, key], 1)[:, :, None] * torch.cat([one, key, value], 1)[:, None]
    outer[:, 1:, 1 : 1 + d] += covariance
    outer[:, 1:, 1 + d :] += cross.mT
    return MomentSums(
        outer * moments.weight[:, None, None],
        (moments.spread + value.square().sum(1)) * moments.weight,
        moments.squares,
    )


def merge_neighbours(moments: Moments, origin: Tensor) -> Moments:
    """Merge every two neighbouring clusters: moments of 2C clusters become moments of C."""
    sums = sums_from_moments(moments, origin)
    pairs = MomentSums(*(part.view(-1, 2, *part.shape[1:]).sum(1) for part in sums))
    return moments_from_sums(pairs, origin)


def quadratic_features(query: Tensor) -> Tensor:
    """Multiply out q so that its product with a triangle of Σ is qᵀΣq: [..., d (d + 1) / 2]."""
    first, second = torch.triu_indices(query.shape[-1], query.shape[-1])
    both = query.index_select(-1, first).mul_(query.index_select(-1, second))
    return both.mul_(torch.where(first == second, 1.0, 2.0))
