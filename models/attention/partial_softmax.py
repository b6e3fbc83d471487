"""Parts of one softmax: attention over some rows, in a form in which parts can be put together.

    log Z = log Σ_j e^(s_j)    c = Σ_j e^(s_j - log Z) v_j

Parts with their log Z are merged exactly, as ring attention and flash decoding do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# The fused kernel behind `scaled_dot_product_attention`, which keeps log Z to itself.
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")  # noqa: B009
_HIDDEN = -1e30  # of a row that nobody sees: the kernel makes NaN of a block of -inf alone


class PartialSoftmax(NamedTuple):
    """Attention over some rows, H heads and T targets.

    context: [H, T, d_v] the weighted mean of their values; zero where there are none.
    log_mass: [H, T] log of the sum of e^score; -inf, or next to it, where there are none.
    """

    context: Tensor
    logsumexp: Tensor

    @classmethod
    def empty(cls, heads: int, targets: int, width: int) -> PartialSoftmax:
        """Attention over no rows."""
        return cls(torch.zeros(heads, targets, width), torch.full((heads, targets), -math.inf))

    def target(self, target: int) -> PartialSoftmax:
        """That of one target, T = 1."""
        return PartialSoftmax(*(part[:, target : target + 1] for part in self))


class KVBlock(NamedTuple):
    """Some rows of a memory, heads first: keys [H, n, d], values [H, n, d_v] and their bias.

    bias: [H, n], or [H, T, n] where it depends on the target; -inf hides a row.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor


def attend_blocks(query: Tensor, blocks: Iterable[KVBlock]) -> PartialSoftmax:
    """Exact attention by the scaled dot product over rows that come in blocks.

    Args:
        query: [H, T, d].
        blocks: at least one, of the same heads and at least one row.
    """
    total: PartialSoftmax | None = None
    heads, targets, width = query.shape
    for rows in blocks:
        bias = rows.bias.clamp(min=_HIDDEN)
        bias = (bias[:, None] if bias.dim() == 2 else bias)[None].expand(1, heads, targets, -1)
        context, log_mass = _FUSED(
            query[None], rows.keys[None], rows.values[None], attn_mask=bias, scale=width**-0.5
        )
        part = PartialSoftmax(context[0], log_mass[0])
        total = part if total is None else merge_partials(total, part)
    if total is None:
        raise ValueError("blocks: there must be at least one")
    return total


def merge_partials(first: PartialSoftmax, second: PartialSoftmax) -> PartialSoftmax:
    """Attention over the rows of both."""
    log_mass = torch.logaddexp(first.logsumexp, second.logsumexp)
    share = (first.logsumexp - log_mass).exp().nan_to_num(0.0)  # of nothing and nothing
    return PartialSoftmax(torch.lerp(second.context, first.context, share[..., None]), log_mass)
