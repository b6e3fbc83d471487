"""Exact cross-entropy over many classes; the forward pass computes the gradient chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

MASKED_LOGIT = -1e9  # probability 0 after softmax, yet finite, so that gradients stay finite


class Chunk(NamedTuple):
    """Rows [first, last) of the loss, few enough for their logits to stay in the cache."""

    first: int
    last: int
    hidden: Tensor  # int64 [any], flat indices into the chunk's [rows, classes] to mask
    counts: Callable[[], Sequence[Tensor]] | None  # S of [rows, classes], multiplied by `scale`


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Σ_t w_t (log Σ_c e^z_tc − z_t,target) / Σ w with z = h Eᵀ + b + Σ_s λ_s·C_s."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        scale: Tensor,
        classes: Tensor,
        bias: Tensor,
        targets: Tensor,
        target_weights: Tensor,
        chunks: Iterable[Chunk],
        dtype: torch.dtype,
    ) -> Tensor:
        narrow, low = classes.to(dtype), states.to(dtype)
        to_states = torch.empty_like(states)
        to_scale = torch.zeros_like(scale)
        to_classes, to_bias = torch.zeros_like(classes), torch.zeros_like(bias)
        total = states.new_zeros(())
        for first, last, hidden, counts in chunks:
            rows = slice(first, last)
            target, weight = targets[rows, None], target_weights[rows, None]
            logits = torch.mm(low[rows], narrow.T).float().add_(bias)
            chunk_counts = counts() if counts is not None else ()
            for number, each in enumerate(chunk_counts):
                logits.addcmul_(each, scale[rows, number, None])
            own = logits.gather(1, target)
            logits.view(-1)[hidden] = MASKED_LOGIT
            logits.scatter_(1, target, own)  # a target is never masked
            peak = logits.amax(1, keepdim=True)
            shares = logits.sub_(peak).exp_()
            partition = shares.sum(1, keepdim=True)
            total += ((partition.log() + peak - own) * weight).sum()
            shares.mul_(weight / partition).scatter_add_(1, target, -weight)
            for number, each in enumerate(chunk_counts):
                to_scale[rows, number] = torch.linalg.vecdot(shares, each)
            to_bias += shares.sum(0)
            shares = shares.to(dtype)
            to_states[rows] = torch.mm(shares, narrow)
            to_classes += torch.mm(shares.T, low[rows])
        weights = target_weights.sum().clamp(min=1e-30)
        gradients = (to_states, to_scale, to_classes, to_bias)
        ctx.save_for_backward(*(gradient / weights for gradient in gradients))
        return total / weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = (part * gradient for part in ctx.saved_tensors)
        return (*parts, None, None, None, None)


def chunked_cross_entropy(
    states: Tensor,
    scale: Tensor,
    classes: Tensor,
    bias: Tensor,
    *,
    targets: Tensor,
    target_weights: Tensor,
    chunks: Iterable[Chunk],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the mean cross-entropy under softmax(h Eᵀ + b + Σ_s λ_s C_s) without keeping logits.

    Args:
        states: h, float32 [T, d].
        scale: λ, float32 [T, S].
        classes: E, float32 [C, d].
        bias: b, float32 [C].
        targets: int64 [T].
        target_weights: float32 [T], each row's weight in the mean.
        chunks: cover the rows.
        dtype: of the matrix products; sums stay in float32.
    """
    loss = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, scale, classes, bias, targets, target_weights, chunks, dtype
    )
    return cast(Tensor, loss)
