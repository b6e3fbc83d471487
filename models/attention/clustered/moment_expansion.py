"""Moment expansion: attention by the moments of clusters, with an error estimated from a sample.

    Σ_i w_i e^(s_i) [1, v_i]  ≈  expansion + Σ_sampled (true term - expanded term) / probability

The expanded term of row i in cluster j is w_i e^(s̄_j + σ_j²/2) (1 + q·(k_i - k̄_j)): summed over a
cluster that is its expansion, so the sample is a control variate for the terms that the expansion
leaves out. The correction is shrunk towards zero by its own noise (positive-part James-Stein).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.clustered.cluster_tree import ClusterLevel, ClusterTree
from models.attention.clustered.moments import quadratic_features
from models.attention.partial_softmax import PartialSoftmax

CONFIDENCE = 1.3  # standard errors that 99 of 100 contexts are within, on keys of trained models
_MAX_VARIANCE = 20.0  # of scores in a cluster, beyond which an expansion is worthless
_MAX_EXPONENT = 60.0  # of a row's score above its cluster's, where e^ of it is cut
_SHRINKAGE = 2.0  # variances of the correction that are taken off it
_SCORES = 1 << 15  # of one head held at once: some of them stay in a core's cache


class ClusteredAttention(NamedTuple):
    """Attention over very many rows, for H heads and T targets.

    partial: context and log-sum-exp, of these rows and of the recent partial.
    error: [H, T] of the context, relative to its length, at 99 % confidence.
    scanned: [H, T] rows of these that were attended one by one.
    exact_logsumexp: [H, T] log-sum-exp of the rows attended one by one, the recent ones included.
    clusters_needed: [H, T] clusters to attend row by row until the error is the tolerance; 0 where
        no tolerance was given.
    """

    partial: PartialSoftmax
    error: Tensor
    scanned: Tensor
    exact_logsumexp: Tensor
    clusters_needed: Tensor

    @classmethod
    def exact(cls, partial: PartialSoftmax, scanned: int) -> ClusteredAttention:
        """Attention over rows that were all attended one by one, `scanned` of them not recent."""
        zero = torch.zeros_like(partial.logsumexp)
        return cls(partial, zero, zero + scanned, partial.logsumexp.clone(), zero)


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
    """Attend by one level of clusters.

    Args:
        tree: the rows.
        level: number of the level in the tree.
        heads: which heads, G of them; one alone with `exact_clusters`.
        scaled_query: [G, T, d] queries divided by √d.
        recent_partial: attention over other rows of the same memory.
        order: 2, or 1 as a reference: each cluster as one row at its mean, without correction.
        exact_clusters: how many clusters are attended row by row, those that would add most to the
            error; of the last level.
        tolerance: the error wanted, from which `clusters_needed` is estimated.
    """
    clusters = tree.levels[level].select_heads(heads)
    step = max(1, _SCORES // clusters.log_weight.shape[1])
    parts = []
    for at in range(0, scaled_query.shape[1], step):
        recent = PartialSoftmax(*(part[:, at : at + step] for part in recent_partial))
        expansion = _Expansion(clusters, scaled_query[:, at : at + step], recent, order)
        parts.append(expansion.attend(tree, heads, exact_clusters, tolerance))
    if len(parts) == 1:
        return parts[0]
    context, logsumexp, *rest = (
        torch.cat(each, 1) for each in zip(*((*p.partial, *p[1:]) for p in parts), strict=True)
    )
    return ClusteredAttention(PartialSoftmax(context, logsumexp), *rest)


class _Expansion:
    """One block of targets over one level."""

    def __init__(
        self, level: ClusterLevel, query: Tensor, recent: PartialSoftmax, order: int
    ) -> None:
        dim = query.shape[-1]
        moments = level.moments
        self.level, self.query, self.recent, self.order = level, query, recent, order
        self.width = recent.context.shape[-1]
        self.mean_score = query @ moments.keys[..., :dim].mT  # (G, T, C)
        variance = quadratic_features(query) @ moments.keys[..., dim:].mT
        variance.clamp_(0, _MAX_VARIANCE)
        # Variance of a row about its expansion, with normal scores: relative to the cluster's.
        self.noise = (torch.expm1(variance) - variance).mul_(level.inflation[:, None])
        self.half = variance.div_(2) if order == 2 else torch.zeros_like(variance)
        logits = level.log_weight[:, None] + self.mean_score + self.half
        self.peak = torch.maximum(logits.amax(-1), recent.logsumexp)[..., None]
        self.weights = logits.sub_(self.peak).exp_()  # (G, T, C)

    def attend(
        self, tree: ClusterTree, heads: slice, exact_clusters: int, tolerance: float | None
    ) -> ClusteredAttention:
        """Expand, attend the clusters that matter most row by row, correct, and state the error."""
        width, order, weights = self.width, self.order, self.weights
        exact = (self.recent.logsumexp[..., None] - self.peak).exp()  # (G, T, 1)
        context, scanned = self.recent.context * exact, 0
        if exact_clusters:
            chosen = (weights.square() * self.noise).topk(exact_clusters, -1).indices
            weights.scatter_(-1, chosen, 0.0)
            more, powers = self._attend_rows(tree, heads.start, chosen[0])
            exact, context = exact + powers, context + more
            scanned = exact_clusters * self.level.size
        total = exact + weights.sum(-1, keepdim=True)
        gathered = weights @ self.level.moments.values
        context = context + gathered[..., :width]
        if order == 2:
            slopes = gathered[..., width:].view(*gathered.shape[:-1], width, -1)
            context += (slopes @ self.query[..., None])[..., 0]
        residuals = self._residuals()  # (S, G, T, d_v + 1)
        mean = residuals.mean(0)
        corrected = (total + mean[..., width:]).clamp(min=1e-30)
        centre = (context + mean[..., :width]) / corrected
        moved = (residuals[..., :width] - residuals[..., width:] * centre) / corrected
        expected = self._expected_variance(centre, total).div_(len(residuals))  # (G, T, C)
        # The sample's variance (G, T) is not trusted alone: it may have missed what matters.
        apart = (moved - moved.mean(0)).square_().sum((0, -1)) / (len(moved) - 1)  # var(0) is slow
        variance = torch.maximum(apart / len(moved), expected.sum(-1))
        if order == 2:
            step = moved.mean(0).square().sum(-1)
            shrunk = (1 - _SHRINKAGE * variance / step.clamp(min=1e-30))[..., None]
            mean = torch.where(shrunk > 0, shrunk * mean, 0.0)  # 0 too where a term overflowed
            total = total + mean[..., width:]
            context = context + mean[..., :width]
        context = context / total
        length = context.norm(dim=-1).clamp(min=1e-30)
        error = (CONFIDENCE * variance.sqrt() / length).nan_to_num_(nan=math.inf)
        needed = torch.zeros_like(error)
        if tolerance is not None:
            rest = expected.sort(-1).values.cumsum(-1)  # left when all larger ones are exact
            limit = (tolerance * length / CONFIDENCE).square()[..., None]
            needed = (rest > limit).sum(-1).float()
        return ClusteredAttention(
            PartialSoftmax(context, (total.log() + self.peak)[..., 0]),
            error,
            torch.full_like(error, scanned),
            (exact.log() + self.peak)[..., 0],
            needed,
        )

    def _residuals(self) -> Tensor:
        """Estimate by S samples, of one row of each cluster, the terms the expansion leaves out."""
        residuals = []
        level = self.level
        for row in range(level.sample.keys.shape[1]):
            away = torch.baddbmm(self.mean_score, self.query, level.sample.keys[:, row].mT, beta=-1)
            off = (away - self.half).clamp_(max=_MAX_EXPONENT).exp_().sub_(1)
            if self.order == 2:
                off.sub_(away)
            off.mul_(self.weights).mul_(level.shares[:, row, None])
            residuals.append(off @ level.sample.values[:, row])
        return torch.stack(residuals)

    def _expected_variance(self, centre: Tensor, total: Tensor) -> Tensor:
        """Predict each cluster's part of the variance of one sample, with normal scores."""
        values = self.level.moments.values[..., : self.width]
        far = (self.level.moments.spread + values.square().sum(-1))[:, None]
        far = far + torch.baddbmm(centre.square().sum(-1, True), centre, values.mT, alpha=-2)
        return far.clamp_(min=0).mul_(self.noise).mul_((self.weights / total).square_())

    def _attend_rows(self, tree: ClusterTree, head: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Sum e^s v [1, T, d_v] and e^s [1, T, 1], over e^peak, of clusters [T, p] of one head."""
        rows = tree.cluster_rows(head, chosen).flatten(1)  # (T, p · B)
        hidden, rows = rows < 0, rows.clamp(min=0)
        scores = (tree.keys(head, rows) @ self.query[0, :, :, None])[..., 0]
        scores += tree.log_weights(head, rows) - self.peak[0]
        weights = scores.exp_().masked_fill_(hidden, 0.0)
        more = weights[:, None] @ tree.values(head, rows)
        return more[None, :, 0], weights.sum(1)[None, :, None]
