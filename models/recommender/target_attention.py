"""Target cross-attention of the whole catalogue: every item as the target of one history."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ItemTables(NamedTuple):
    """Per-item projections, computed once per model version: N items, H heads."""

    vectors: Tensor  # [N, dim] item tower
    queries: Tensor  # [H, N, d] W_Q
    keys: Tensor  # [H, N, d] W_K
    values: Tensor  # [H, N, d] W_V
    outputs: Tensor  # [H, N, d] W_O^T: the direction in which a value raises the score
    prior: Tensor  # [N]


def target_attention(tables: ItemTables, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute Σ_h ⟨context_h, o_h⟩ of every item as the target of one history per batch row.

    Args:
        tables: the targets, N items.
        keys: [B, H, L, d].
        values: [B, H, L, d].
        bias: [B, H, L]; -inf hides a row.

    Returns:
        Tensor: [B, N].
    """
    rows = []
    # One history and one head at a time: its scores with every item still fit the cache, and
    # batched products of this shape are far slower than plain ones.
    for own_keys, own_values, own_bias in zip(keys, values, bias, strict=True):
        total = torch.zeros_like(tables.prior)
        for head in range(len(own_bias)):
            if bool((own_bias[head] == -math.inf).all()):
                continue  # no visible row
            query, output = tables.queries[head] * keys.shape[-1] ** -0.5, tables.outputs[head]
            weights = torch.softmax(torch.mm(query, own_keys[head].T).float() + own_bias[head], -1)
            # A context is as long as a head is wide: a third of the time of gains by row.
            context = torch.mm(weights.to(output.dtype), own_values[head])
            total = total + torch.linalg.vecdot(context.float(), output.float())
        rows.append(total)
    return torch.stack(rows)


def target_attention_prefixes(
    queries: Tensor, outputs: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> Tensor:
    """Compute the target attention of T prefixes of each history at once, in matrix products.

    The exponential of a score factors into a part of (target, row) and a part of (prefix, row),
    e^(s_cj + b_tj) = e^(s_cj) e^(b_tj), so numerator and denominator of all prefixes are the
    products E·Wᵀ and (E ⊙ G)·Wᵀ with E = e^s [N, L], G = ⟨v_j, o_c⟩ [N, L], W = e^b [T, L]:
    L exponentials a target instead of T·L.

    Args:
        queries: of N targets per history or shared, [B, H, N, d] or [H, N, d].
        outputs: likewise.
        keys: [B, H, L, d].
        values: [B, H, L, d].
        bias: [B, H, T, L]; -inf hides a row from a prefix; a prefix without a visible row
            gets 0.

    Returns:
        Tensor: [B, T, N].
    """
    score = (queries @ keys.mT).float() / keys.shape[-1] ** 0.5  # (B, H, N, L)
    gain = outputs @ values.mT  # (B, H, N, L)
    # Softmax is invariant to a constant on all its scores; subtracting the maxima bounds e^x.
    shared = torch.exp(score - score.detach().amax(-1, keepdim=True))
    peak = bias.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -math.inf, 0.0)  # no visible row
    prefix = torch.exp(bias - peak).mT  # (B, H, L, T)
    total = (shared @ prefix).float()
    weighted = ((shared * gain) @ prefix).float()
    # The maximum may be of a row in the prefix's future; the prefix's own sum is then tiny.
    return (weighted / total.clamp(min=1e-30)).sum(1).mT  # (B, N, T) -> (B, T, N)
