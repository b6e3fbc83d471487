"""Partial softmax: attention over some rows, in a form in which parts can be merged exactly.

    log Z = log Σ_j e^(s_j)    c = Σ_j e^(s_j - log Z) v_j

Parts with their log Z are merged as ring attention (Liu et al. 2023) and flash decoding do. Public
`scaled_dot_product_attention` keeps this log-sum-exp to itself, so the private operator behind it
is called. torch is pinned by a range: if a release lacks the operator, or declares it otherwise,
`attention_with_logsumexp` is the plain path.

The mass of some rows, their share of the full softmax, is estimated from a sample of the others.
The first-order term of a context in its query is a Jacobian: with the mean key k̄ = Σ α_j k_j,

    c(q + δ) ≈ c(q) + δ J,    J = Σ_j α_j (k_j - k̄) v_jᵀ / √d,

the covariance of keys and values under α. One J serves all queries near q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from models.compute.checkpoint import checkpoint

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
    "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
)


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend by the scaled dot product, holding all scores at once.

    query [H, T, d], keys [H, n, d], values [H, n, d_v] and a finite bias [H, 1 or T, n] give
    contexts [H, T, d_v] and the log-sum-exp of the scores [H, T].
    """
    scores = (query @ keys.mT).mul_(query.shape[-1] ** -0.5).add_(bias)
    logsumexp = scores.logsumexp(-1)
    return torch.softmax(scores, -1) @ values, logsumexp


def select_kernel(operators: Any) -> Kernel:
    """Return the fused kernel of a namespace as `torch.ops.aten`, or `plain_attention`."""
    operator = getattr(operators, _OPERATOR, None)
    schema = str(getattr(getattr(operator, "default", None), "_schema", ""))
    if operator is None or not schema.endswith(_SCHEMA):
        return plain_attention

    def fused_attention(
        query: Tensor, keys: Tensor, values: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        mask = bias[None].expand(1, *query.shape[:2], -1)
        found = operator(
            query[None], keys[None], values[None], attn_mask=mask, scale=query.shape[-1] ** -0.5
        )
        context, logsumexp = cast(tuple[Tensor, Tensor], found)
        return context[0], logsumexp[0]

    return fused_attention


attention_with_logsumexp = select_kernel(torch.ops.aten)


# Bias of a hidden row, and log-sum-exp of no rows: with -inf the fused kernel makes NaN of a block
# that is hidden whole, and so does the difference of two log-sum-exps.
LOWEST = -1e30
_LEAST_LEFT = 1e-6  # a smaller share of a softmax is nothing but rounding


class PartialSoftmax(NamedTuple):
    """Attention over some rows, H heads and T targets.

    context [H, T, d_v] is the weighted mean of their values, zero without rows; logsumexp [H, T]
    the log of the sum of e^score, -1e30 without rows.
    """

    context: Tensor
    logsumexp: Tensor

    @classmethod
    def empty(cls, heads: int, targets: int, width: int) -> PartialSoftmax:
        return cls(torch.zeros(heads, targets, width), torch.full((heads, targets), LOWEST))

    def target(self, number: int) -> PartialSoftmax:
        return PartialSoftmax(*(part[:, number : number + 1] for part in self))


class Attended(NamedTuple):
    """Attention of T targets over a memory whose rows need not all be attended one by one.

    partial: contexts and log-sum-exps; for the hard attention the largest score stands for these.
    mass, error [H, T]: the share of the full softmax that the rows attended one by one hold; the
    context's error, relative to its length, at 99 % confidence. scanned [H, T]: rows attended one
    by one. rows int64 [H, T, k]: those that were retrieved, ascending, then -1; None = not
    retrieved.
    """

    partial: PartialSoftmax
    mass: Tensor
    error: Tensor
    scanned: Tensor
    rows: Tensor | None = None

    @classmethod
    def exact(cls, partial: PartialSoftmax, rows: int) -> Attended:
        """Attention over rows that were all attended one by one."""
        like = partial.logsumexp
        one, zero = torch.ones_like(like), torch.zeros_like(like)
        return cls(partial, one, zero, torch.full_like(like, rows))

    @classmethod
    def concat(cls, parts: Sequence[Attended]) -> Attended:
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
    logsumexp = torch.logaddexp(first.logsumexp, second.logsumexp)
    share = (first.logsumexp - logsumexp).exp()
    return PartialSoftmax(torch.lerp(second.context, first.context, share[..., None]), logsumexp)


def remove_partial(whole: PartialSoftmax, part: PartialSoftmax) -> PartialSoftmax:
    """Attend over the rows of `whole` without those of `part`, which are among them.

    The error is that of `whole` divided by the remaining share, at least 1e-6.
    """
    share = (part.logsumexp - whole.logsumexp).exp().clamp(max=1 - _LEAST_LEFT)
    context = whole.context - share[..., None] * part.context
    return PartialSoftmax(context / (1 - share[..., None]), whole.logsumexp + torch.log1p(-share))


SAMPLE = 2048
"""Rows scored for an estimate; the mass of a memory with no more rows is exact."""


def mass_from_sample(
    inside: Tensor,
    outside: Tensor,
    rest: Tensor,
    *,
    temperature: float = 1.0,
    hard: bool = False,
) -> Tensor:
    """Estimate the mass [T, H] of some rows from their scores and those of a sample of the others.

    `inside` [T, H, k] and `outside` [T, H, m] are scores, -inf for no row; `rest` [T, H] counts the
    others. `hard` gives 1 if no sampled row beats the rows inside, else 0.
    """
    lowest = inside.new_full((*inside.shape[:2], 1), -math.inf)
    best_in = torch.cat([inside, lowest], 2).amax(2, keepdim=True)
    best_out = torch.cat([outside, lowest], 2).amax(2, keepdim=True)
    if hard:
        return (best_in >= best_out).to(inside.dtype).squeeze(2)
    peak = torch.maximum(best_in, best_out)
    peak = peak.masked_fill(peak == -math.inf, 0.0)

    sampled = (outside > -math.inf).sum(2)
    held = ((inside - peak) / temperature).exp().sum(2)
    mean = ((outside - peak) / temperature).exp().sum(2) / sampled.clamp(min=1)
    # A target whose few other rows all escaped the sample: let each weigh as the least retrieved.
    blind = (sampled == 0) & (rest > 0)
    least = inside.masked_fill(inside == -math.inf, math.inf).amin(2, keepdim=True)
    mean = torch.where(blind, ((least - peak) / temperature).exp().squeeze(2), mean)
    return torch.where(rest == 0, 1.0, held / (held + rest * mean))


def stratified_rows(n: int) -> Tensor:
    """Draw one row from each of `SAMPLE` equal stretches of n rows, the same at every call.

    A seed draws the row of each stretch: a fixed stride would beat with periods in the data.
    """
    if n <= SAMPLE:
        return torch.arange(n)
    edges = torch.arange(SAMPLE + 1) * n // SAMPLE
    draw = torch.rand(SAMPLE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return edges[:-1] + (draw * (edges[1:] - edges[:-1])).long()


def query_jacobian(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute J [..., d, d_v] of scaled dot product attention over n rows.

    query [..., d], keys [..., n, d], values [..., n, d_v] and a bias [..., n] on the scores; -inf
    hides a row. J is zero without a visible row.
    """
    scale = keys.shape[-1] ** -0.5
    scores = (keys @ query[..., None])[..., 0] * scale + bias
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., None]  # (..., n, 1)
    centred = keys - (weights * keys).sum(-2, keepdim=True)
    jacobian: Tensor = (centred * (weights * scale)).mT @ values
    return jacobian
