"""Partial softmax: attention over some rows, in a form in which parts can be merged exactly.

    log Z = log Σ_j e^(s_j)    c = Σ_j e^(s_j - log Z) v_j

Parts with their log Z are merged as ring attention (Liu et al. 2023) and flash decoding do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.flash_kernel import attention_with_logsumexp
from models.compute.checkpoint import checkpoint

# Bias of a hidden row, and log-sum-exp of no rows: with -inf the fused kernel makes NaN of a block
# that is hidden whole, and so does the difference of two log-sum-exps.
LOWEST = -1e30
_LEAST_LEFT = 1e-6  # a smaller share of a softmax is nothing but rounding


class PartialSoftmax(NamedTuple):
    """Attention over some rows, H heads and T targets.

    context: [H, T, d_v] the weighted mean of their values; zero without rows.
    logsumexp: [H, T] log of the sum of e^score; -1e30 without rows.
    """

    context: Tensor
    logsumexp: Tensor

    @classmethod
    def empty(cls, heads: int, targets: int, width: int) -> PartialSoftmax:
        """Attention over no rows."""
        return cls(torch.zeros(heads, targets, width), torch.full((heads, targets), LOWEST))

    def target(self, number: int) -> PartialSoftmax:
        """Attention of one target, T = 1."""
        return PartialSoftmax(*(part[:, number : number + 1] for part in self))


class Attended(NamedTuple):
    """Attention of T targets over a memory, some rows of which may not be attended one by one.

    partial: contexts and log-sum-exps; for the hard attention the largest score stands for these.
    mass: [H, T] share of the full softmax that the rows attended one by one hold.
    error: [H, T] of the context, relative to its length, at 99 % confidence.
    scanned: [H, T] rows attended one by one.
    rows: int64 [H, T, k] those that were retrieved, ascending, then -1; None = not retrieved.
    """

    partial: PartialSoftmax
    mass: Tensor
    error: Tensor
    scanned: Tensor
    rows: Tensor | None = None

    @classmethod
    def exact(cls, partial: PartialSoftmax, rows: int) -> Attended:
        """Attention over rows all of which were attended one by one."""
        like = partial.logsumexp
        one, zero = torch.ones_like(like), torch.zeros_like(like)
        return cls(partial, one, zero, torch.full_like(like, rows))

    @classmethod
    def concat(cls, parts: Sequence[Attended]) -> Attended:
        """Concatenate the attention of some targets and others over the same memory."""
        if len(parts) == 1:
            return parts[0]
        context, logsumexp, mass, error, scanned = (
            torch.cat(each, 1) for each in zip(*((*p.partial, *p[1:4]) for p in parts), strict=True)
        )
        rows = [part.rows for part in parts if part.rows is not None]
        partial = PartialSoftmax(context, logsumexp)
        return cls(partial, mass, error, scanned, torch.cat(rows, 1) if rows else None)

    def put(self, heads: slice, targets: Tensor, better: Attended) -> None:
        """Store the attention of some heads and targets [P] in place of theirs."""
        parts = zip((*self.partial, *self[1:4]), (*better.partial, *better[1:4]), strict=True)
        for old, new in parts:
            old[heads, targets] = new


class KVBlock(NamedTuple):
    """Some rows of a memory, heads first: keys [H, n, d], values [H, n, d_v] and their bias."""

    keys: Tensor
    values: Tensor
    bias: Tensor  # [H, n], -inf hides a row
    visible: Tensor | None = None  # bool [T, n], True = the target may attend to the row


def attend_blocks(query: Tensor, blocks: Iterable[KVBlock]) -> PartialSoftmax:
    """Attend by queries [H, T, d] over blocks of rows, at least one, by the scaled dot product."""
    return reduce(merge_partials, (_attend_block(query, block) for block in blocks))


def _attend_block(query: Tensor, block: KVBlock) -> PartialSoftmax:
    checkpoint()
    if not block.keys.shape[1]:  # the fused kernel divides by the number of rows
        return PartialSoftmax.empty(query.shape[0], query.shape[1], block.values.shape[2])
    bias = block.bias.clamp(min=LOWEST)[:, None]
    if block.visible is not None:
        bias = bias + torch.full(block.visible.shape, LOWEST).masked_fill_(block.visible, 0.0)
    context, logsumexp = attention_with_logsumexp(query, block.keys, block.values, bias)
    if logsumexp.amin().item() <= LOWEST / 2:  # the kernel weighs rows all hidden alike
        context = context.masked_fill((logsumexp <= LOWEST / 2)[..., None], 0.0)
    return PartialSoftmax(context, logsumexp)


def merge_partials(first: PartialSoftmax, second: PartialSoftmax) -> PartialSoftmax:
    """Attend over the rows of both, given attention over each."""
    logsumexp = torch.logaddexp(first.logsumexp, second.logsumexp)
    share = (first.logsumexp - logsumexp).exp()
    return PartialSoftmax(torch.lerp(second.context, first.context, share[..., None]), logsumexp)


def remove_partial(whole: PartialSoftmax, part: PartialSoftmax) -> PartialSoftmax:
    """Attend over the rows of `whole` without those of `part`, which are among them.

    The error is that of `whole` divided by the share that is left, which is at least 1e-6.
    """
    share = (part.logsumexp - whole.logsumexp).exp().clamp(max=1 - _LEAST_LEFT)
    context = whole.context - share[..., None] * part.context
    return PartialSoftmax(context / (1 - share[..., None]), whole.logsumexp + torch.log1p(-share))
