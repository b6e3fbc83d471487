"""Causal attention over whole windows with bucketed score biases and a hand-written gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from models.encoder.event_bias import BUCKETS, bucket_sums, recency_bucket

FUTURE_BUCKET = BUCKETS  # of a key in the query's future, above the diagonal
_MASKED_BIAS = -1e9  # of a future key: weight 0 after softmax, yet finite in every dtype
_BLOCK = 64  # queries at once; keys after a block's last query are skipped


def causal_buckets(timestamps: Tensor, at: Tensor) -> Tensor:
    """Bucket every event by position and age at each prefix: int32 [B, L, L], prefix by event.

    `timestamps` and `at`, the time at which a prefix takes ages, are int64 microseconds [B, L].
    """
    position = torch.arange(timestamps.shape[1], device=timestamps.device)
    distance = position[:, None] - position  # (L, L)
    age = at[:, :, None] - timestamps[:, None, :]  # (B, L, L)
    return recency_bucket(distance, age).masked_fill_(distance < 0, FUTURE_BUCKET)


class _CausalAttention(torch.autograd.Function):
    """softmax(q kᵀ / √d + table[bucket] + row_bias) v, one block of queries at a time.

    torch's fused kernels give no gradient for a bias, and its plain path would materialise the
    whole square of scores. This computes the visible half, keeps the weights in the dtype of the
    queries, and accumulates the bias's gradient by bincount instead of scatter-add.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        bucket: Tensor,
        row_bias: Tensor | None,
    ) -> Tensor:
        heads, batch, length, size = query.shape
        shape = (heads * batch, length, size)
        query = (query * size**-0.5).reshape(shape)
        key, value = key.reshape(shape), value.reshape(heads * batch, length, -1)
        if row_bias is not None:
            row_bias = row_bias.reshape(heads * batch, 1, length).clamp(min=_MASKED_BIAS)
        biases = torch.cat([table, table.new_full((heads, 1), _MASKED_BIAS)], 1)
        out = torch.empty_like(value)
        saved: list[Tensor] = []
        for first in range(0, length, _BLOCK):
            last = min(length, first + _BLOCK)
            buckets = bucket[:, first:last, :last].reshape(-1)
            scores = biases.index_select(1, buckets).view(-1, last - first, last)
            scores += torch.bmm(query[:, first:last], key[:, :last].mT)
            if row_bias is not None:
                scores += row_bias[..., :last]
            weights = torch.softmax(scores, -1).to(query.dtype)
            out[:, first:last] = torch.bmm(weights, value[:, :last])
            saved += [weights, buckets]
        ctx.save_for_backward(query, key, value, out, *saved)
        ctx.shape, ctx.has_row_bias = (heads, batch, length, size), row_bias is not None
        return out.view(heads, batch, length, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *saved = ctx.saved_tensors
        heads, _, length, size = ctx.shape
        gradient = gradient.reshape(out.shape).to(out.dtype)
        # Σ_j w_j ∂w_j of each query, the term that the softmax's gradient subtracts.
        weighted = (gradient * out).sum(-1, keepdim=True, dtype=torch.float32)
        to_query = torch.empty_like(query)
        to_key = torch.zeros(key.shape, device=key.device)
        to_value = torch.zeros(value.shape, device=key.device)
        to_table = torch.zeros(heads, BUCKETS + 1, device=key.device)
        to_row_bias = torch.zeros(key.shape[:2], device=key.device) if ctx.has_row_bias else None
        for block, first in enumerate(range(0, length, _BLOCK)):
            last = min(length, first + _BLOCK)
            weights, buckets = saved[2 * block : 2 * block + 2]
            outer = gradient[:, first:last]
            to_value[:, :last] += torch.bmm(weights.mT, outer)
            to_scores = torch.bmm(outer, value[:, :last].mT).float()
            to_scores = to_scores.sub_(weighted[:, first:last]).mul_(weights)
            to_table += bucket_sums(buckets, to_scores.view(heads, -1), BUCKETS + 1)
            if to_row_bias is not None:
                to_row_bias[:, :last] += to_scores.sum(1)
            to_scores = to_scores.to(query.dtype)
            to_query[:, first:last] = torch.bmm(to_scores, key[:, :last])
            to_key[:, :last] += torch.bmm(to_scores.mT, query[:, first:last])
        return (
            (to_query * size**-0.5).view(ctx.shape),
            to_key.to(key.dtype).view(ctx.shape),
            to_value.to(value.dtype).view(*ctx.shape[:3], -1),
            to_table[:, :-1],
            None,
            None if to_row_bias is None else to_row_bias.view(ctx.shape[:3]),
        )


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    bucket: Tensor,
    row_bias: Tensor | None = None,
) -> Tensor:
    """Attend from each event of a window over itself and the events before it: [H, B, L, d_v].

    query and key [H, B, L, d], value [H, B, L, d_v]; `table` float32 [H, BUCKETS] is the bias of
    each bucket, `bucket` as from `causal_buckets`. `row_bias` [H, B, L] is a key's; -inf hides it.
    The context is zero where every key so far is hidden.
    """
    context = _CausalAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, table, bucket, row_bias
    )
    if row_bias is not None:
        hidden = row_bias.detach() == -torch.inf
        if bool(hidden.any()):
            context = context * (~hidden).cummax(2).values[..., None]
    return cast(Tensor, context)
