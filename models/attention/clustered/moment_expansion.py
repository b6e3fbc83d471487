"""Attention by the expansion of cells, and what a sample of their rows says of its error.

    Σ_i w_i e^(s_i) [1, v_i]  ≈  expansion + Σ_sampled (true term - expanded term) / probability

What was expanded of row i of cell j is w_i e^(s̄_j + σ_j²/2) (1 + q·(k_i - k̄_j)): summed over a cell
that is its expansion, so the sample is a control variate for what the expansion leaves out. It is
added as far as it stands out of its own noise (positive-part James-Stein).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.clustered.cluster_tree import ClusterLevel, ClusterTree
from models.attention.clustered.moments import quadratic_features
from models.attention.partial_softmax import PartialSoftmax

CONFIDENT = 1.3  # standard errors that 99 of 100 contexts are within, on keys of trained models
_STEEP = 20.0  # a variance of scores beyond which an expansion says nothing
_FAR = 60.0  # by how much a row's score may be above its cell's before e^ of it is cut
_DOUBT = 2.0  # variances of the correction that are taken off it
_SCORES = 1 << 15  # of one head held at once: some of them stay in a core's cache


class ClusteredAttention(NamedTuple):
    """What attending to very many rows gave, for H heads and T targets.

    partial: context and log mass, of the rows and of what was given beside them.
    error: [H, T] of the context, relative to its length, at 99 % confidence.
    scanned: [H, T] rows that were attended one by one, without those beside.
    covered: [H, T] log of the mass attended one by one, with what was beside.
    toward: [H, T] cells to open, by which the error would be what was aimed at; of no meaning where
        none was.
    """

    partial: PartialSoftmax
    error: Tensor
    scanned: Tensor
    exact_logsumexp: Tensor
    clusters_needed: Tensor


def attend_by_moments(
    tree: ClusterTree,
    level: int,
    heads: slice,
    scaled_query: Tensor,
    recent_partial: PartialSoftmax,
    *,
    order: int = 2,
    exact_clusters: int = 0,
    tolerance: float | None = None,
) -> ClusteredAttention:
    """Attend by one level of cells.

    Args:
        cells: the rows.
        number: of the level.
        heads: which heads, G of them; one alone where cells are opened.
        asked: [G, T, d] queries divided by √d.
        beside: attention over other rows of the same memory.
        order: 2, or 1 as a reference: each cell as one row at its mean, nothing corrected.
        opened: cells whose rows are attended one by one, those that would add most to the error;
            of the last level.
        aim: the error that is wanted, where `Tail.toward` is.
    """
    clusters = tree.levels[level].of(heads)
    step = max(1, _SCORES // clusters.log_weight.shape[1])
    parts = []
    for at in range(0, scaled_query.shape[1], step):
        some = scaled_query[:, at : at + step]
        near = PartialSoftmax(*(part[:, at : at + step] for part in recent_partial))
        parts.append(
            _Estimate(clusters, some, near, order).tail(tree, heads, exact_clusters, tolerance)
        )
    if len(parts) == 1:
        return parts[0]
    context, log_mass, *rest = (
        torch.cat(each, 1) for each in zip(*((*p.partial, *p[1:]) for p in parts), strict=True)
    )
    return ClusteredAttention(PartialSoftmax(context, log_mass), *rest)


class _Estimate:
    """One block of targets over one level."""

    def __init__(
        self, level: ClusterLevel, asked: Tensor, beside: PartialSoftmax, order: int
    ) -> None:
        width = asked.shape[-1]
        found = level.moments
        self.level, self.asked, self.beside, self.order = level, asked, beside, order
        self.wide = beside.context.shape[-1]
        self.base = asked @ found.keys[..., :width].mT  # (G, T, C) the mean score of a cell
        variance = quadratic_features(asked) @ found.keys[..., width:].mT
        variance.clamp_(0, _STEEP)
        # Of a row about its expansion, where scores are normal in a cell: relative to the cell's.
        self.noise = (torch.expm1(variance) - variance).mul_(level.uneven[:, None])
        self.half = variance.div_(2) if order == 2 else torch.zeros_like(variance)
        log_mass = level.log_weight[:, None] + self.base + self.half
        self.peak = torch.maximum(log_mass.amax(-1), beside.logsumexp)[..., None]
        self.weights = log_mass.sub_(self.peak).exp_()  # (G, T, C)

    def tail(
        self, cells: ClusterTree, heads: slice, opened: int, aim: float | None
    ) -> ClusteredAttention:
        """The answer; arguments as of `expanded`."""
        wide, order, weights = self.wide, self.order, self.weights
        held = (self.beside.logsumexp[..., None] - self.peak).exp()  # (G, T, 1)
        context, scanned = self.beside.context * held, 0
        if opened:
            chosen = (weights.square() * self.noise).topk(opened, -1).indices
            weights.scatter_(-1, chosen, 0.0)
            more, mass = self._opened(cells, heads.start, chosen[0])
            held, context, scanned = held + mass, context + more, opened * self.level.size
        total = held + weights.sum(-1, keepdim=True)
        gathered = weights @ self.level.moments.values
        context = context + gathered[..., :wide]
        if order == 2:
            slopes = gathered[..., wide:].view(*gathered.shape[:-1], wide, -1)
            context += (slopes @ self.asked[..., None])[..., 0]
        residuals = self._residuals()  # (S, G, T, d_v + 1)
        mean = residuals.mean(0)
        mass = (total + mean[..., wide:]).clamp(min=1e-30)
        centre = (context + mean[..., :wide]) / mass
        moved = (residuals[..., :wide] - residuals[..., wide:] * centre) / mass
        expected = self._expected(centre, total).div_(len(residuals))  # (G, T, C)
        # The variance of what the sample says, (G, T): it may itself have missed what matters.
        apart = (moved - moved.mean(0)).square_().sum((0, -1)) / (len(moved) - 1)  # var(0) is slow
        doubt = torch.maximum(apart / len(moved), expected.sum(-1))
        if order == 2:
            step = moved.mean(0).square().sum(-1)
            sure = (1 - _DOUBT * doubt / step.clamp(min=1e-30))[..., None]
            mean = torch.where(sure > 0, sure * mean, 0.0)  # of what overflowed nothing is sure
            total = total + mean[..., wide:]
            context = context + mean[..., :wide]
        context = context / total
        length = context.norm(dim=-1).clamp(min=1e-30)
        error = (CONFIDENT * doubt.sqrt() / length).nan_to_num_(nan=math.inf)
        toward = torch.zeros_like(error)
        if aim is not None:
            rest = expected.sort(-1).values.cumsum(-1)  # what is left when all larger are opened
            toward = (rest > (aim * length / CONFIDENT).square()[..., None]).sum(-1).float()
        return ClusteredAttention(
            PartialSoftmax(context, (total.log() + self.peak)[..., 0]),
            error,
            torch.full_like(error, scanned),
            (held.log() + self.peak)[..., 0],
            toward,
        )

    def _residuals(self) -> Tensor:
        """What S samples, of one row of each cell, say that the expansion leaves out."""
        found = []
        level = self.level
        for row in range(level.keys.shape[1]):
            away = torch.baddbmm(self.base, self.asked, level.keys[:, row].mT, beta=-1)
            off = (away - self.half).clamp_(max=_FAR).exp_().sub_(1)
            if self.order == 2:
                off.sub_(away)
            off.mul_(self.weights).mul_(level.shares[:, row, None])
            found.append(off @ level.values[:, row])
        return torch.stack(found)

    def _expected(self, centre: Tensor, total: Tensor) -> Tensor:
        """What each cell adds to the variance of one such sample, were scores normal in it."""
        values = self.level.moments.values[..., : self.wide]
        far = (self.level.moments.spread + values.square().sum(-1))[:, None]
        far = far + torch.baddbmm(centre.square().sum(-1, True), centre, values.mT, alpha=-2)
        return far.clamp_(min=0).mul_(self.noise).mul_((self.weights / total).square_())

    def _opened(self, cells: ClusterTree, head: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Σ e^s v [1, T, d_v] and Σ e^s [1, T, 1], over e^peak, of cells [T, p] of one head."""
        rows = cells.cluster_rows(head, chosen).flatten(1)  # (T, p · B)
        hidden, rows = rows < 0, rows.clamp(min=0)
        scores = (cells.keys(head, rows) @ self.asked[0, :, :, None])[..., 0]
        scores += cells.log_weights(head, rows) - self.peak[0]
        weights = scores.exp_().masked_fill_(hidden, 0.0)
        more = weights[:, None] @ cells.values(head, rows)
        return more[None, :, 0], weights.sum(1)[None, :, None]
