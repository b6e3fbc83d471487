"""What is kept of the rows of a cell: enough to attend to all of them by one expansion.

A cell has rows of weights w_i, keys k_i and values v_i. With n = Σ w_i, the weighted means k̄ and v̄,
the covariance Σ of the keys and the cross-covariance C = Cov(v, k), a query with q' = q / √d gives

    Σ w_i e^(q'·k_i)      ≈ n e^(q'·k̄ + q'ᵀΣq'/2)
    Σ w_i e^(q'·k_i) v_i  ≈ n e^(q'·k̄ + q'ᵀΣq'/2) (v̄ + C q')

exact for keys and values that are jointly normal in the cell, and else up to third order in the
spread of the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Of C cells; the leading dimensions may hold heads too.

    mass: [..., C] Σ w.
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

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self)


class MomentSums(NamedTuple):
    """The same before dividing, about a point that all cells share: these add up.

    outer: [C, 1 + d, 1 + d + d_v] Σ w [1, δ] [1, δ, v]ᵀ with δ = k - the point.
    lengths: [C] Σ w |v|².
    squares: [C] Σ w².
    """

    outer: Tensor
    lengths: Tensor
    squares: Tensor


def sums_from_rows(keys: Tensor, values: Tensor, weights: Tensor, about: Tensor) -> MomentSums:
    """Sums of cells of B rows each: keys [C, B, d], values [C, B, d_v], weights [C, B].

    about: [d], a point near the keys, so that little is lost to rounding.
    """
    away = keys - about
    one = torch.ones_like(away[..., :1])
    left = torch.cat([one, away], -1) * weights[..., None]
    outer = left.mT @ torch.cat([one, away, values], -1)
    return MomentSums(outer, (weights * values.square().sum(-1)).sum(-1), weights.square().sum(-1))


def moments_from_sums(sums: MomentSums, about: Tensor) -> Moments:
    """The moments of cells from their sums about a point [d]; an empty cell has zeros."""
    outer, d = sums.outer, sums.outer.shape[1] - 1
    mass = outer[:, 0, 0].clamp(min=0)
    # What rounding leaves of an emptied cell counts for nothing.
    means = outer / mass.clamp(min=1e-30)[:, None, None]
    away, value = means[:, 0, 1 : 1 + d], means[:, 0, 1 + d :]
    square = means[:, 1:, 1 : 1 + d] - away[:, :, None] * away[:, None]
    cross = means[:, 1:, 1 + d :].mT - value[:, :, None] * away[:, None]  # (C, d_v, d)
    spread = sums.lengths / mass.clamp(min=1e-30) - value.square().sum(-1)
    first, second = torch.triu_indices(d, d)
    held = (mass > 0)[:, None]
    return Moments(
        mass,
        torch.cat([away + about, square[:, first, second]], 1) * held,
        torch.cat([value, cross.flatten(1)], 1) * held,
        spread.clamp(min=0) * held[:, 0],
        sums.squares,
    )


def sums_from_moments(found: Moments, about: Tensor) -> MomentSums:
    """The sums about a point [d] from which `moments` made these."""
    d = len(about)
    wide = found.values.shape[-1] // (1 + d)
    away, value = found.keys[:, :d] - about, found.values[:, :wide]
    square = torch.zeros(len(found.weight), d, d)
    first, second = torch.triu_indices(d, d)
    square[:, first, second] = found.keys[:, d:]
    square[:, second, first] = found.keys[:, d:]
    cross = found.values[:, wide:].view(-1, wide, d)
    one = torch.ones_like(away[:, :1])
    rows = torch.cat([one, away], 1)[:, :, None] * torch.cat([one, away, value], 1)[:, None]
    rows[:, 1:, 1 : 1 + d] += square
    rows[:, 1:, 1 + d :] += cross.mT
    return MomentSums(
        rows * found.weight[:, None, None],
        (found.spread + value.square().sum(1)) * found.weight,
        found.squares,
    )


def merge_neighbours(found: Moments, about: Tensor) -> Moments:
    """Moments of every two neighbouring cells as one: of 2C cells those of C."""
    sums = sums_from_moments(found, about)
    pairs = MomentSums(*(part.view(-1, 2, *part.shape[1:]).sum(1) for part in sums))
    return moments_from_sums(pairs, about)


def quadratic_features(query: Tensor) -> Tensor:
    """What multiplies the covariances in qᵀΣq: [..., d] -> [..., d (d + 1) / 2]."""
    first, second = torch.triu_indices(query.shape[-1], query.shape[-1])
    both = query.index_select(-1, first).mul_(query.index_select(-1, second))
    return both.mul_(torch.where(first == second, 1.0, 2.0))
