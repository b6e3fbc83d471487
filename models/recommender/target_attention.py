"""Target cross-attention of the whole catalogue: every item as the target of one history.

Trainings and evaluations score by it; serving scores by `models.ranking.scoring`, and takes the
coarse step from here. That step ranks the items by their attention to first order in the target's
part of the query. The query of a target is the user's part plus the target's. To first order in the
latter, the attention part of item c is

    ⟨r_u, x_c⟩ + Σ_h q_cʰ Jʰ o_cʰ

with one readout r_u and one Jacobian J of the user's part of the queries for all items: products
with the item tables instead of a softmax for each item. For 600 users of MovieLens 1M, whose model
had learned for one epoch, the first 20 of exact scores were among 155 items at most, and among 905
by ⟨r_u, x_c⟩.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.attend import gather_rows


class ItemTables(NamedTuple):
    """Per-item projections, computed once per model version: N items, H heads."""

    vectors: Tensor  # [N, dim] item tower
    queries: Tensor  # [H, N, d] W_Q
    keys: Tensor  # [H, N, d] W_K
    values: Tensor  # [H, N, d] W_V
    outputs: Tensor  # [H, N, d] W_O^T: the direction in which a value raises the score
    prior: Tensor  # [N]


def target_attention(tables: ItemTables, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute Σ_h ⟨context_h, o_h⟩ of every item as the target of one history per batch row: [B,
    N].

    keys and values [B, H, L, d]; bias [B, H, L], -inf hides a row.
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
    """Compute the target attention of T prefixes of each history at once, [B, T, N].

    The exponential of a score factors into a part of (target, row) and a part of (prefix, row),
    e^(s_cj + b_tj) = e^(s_cj) e^(b_tj), so numerator and denominator of all prefixes are the
    products E·Wᵀ and (E ⊙ G)·Wᵀ with E = e^s [N, L], G = ⟨v_j, o_c⟩ [N, L], W = e^b [T, L]: L
    exponentials a target instead of T·L.

    queries and outputs of N targets, [B, H, N, d] or shared [H, N, d]; keys and values [B, H, L,
    d]; bias [B, H, T, L], -inf hides a row from a prefix. A prefix without a visible row gets 0.
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


CANDIDATES = 200  # items at least whose attention is then computed exactly
# Items with the largest scores by ⟨r_u, x_c⟩ that are compared to first order, at least: the
# products of more items leave the cache.
FIRST_ORDER_ITEMS = 1_536


def nearest_items(
    tables: ItemTables,
    rows: Tensor,
    near: Tensor,
    jacobian: Tensor | None,
    count: int,
    compared: int,
) -> Tensor:
    """Return the `count` rows of the largest scores to first order, int64 [count], in no order.

    `near` [T] are the scores of `rows` int64 [T] with the attention part ⟨r_u, x_c⟩; -inf leaves an
    item out. `jacobian` [H, d, d] is that of the user's part of the queries; None leaves the scores
    as they are. The `compared` largest, at least `count`, are compared to first order.
    """
    if jacobian is not None:
        if len(rows) > compared:
            near, kept = near.topk(compared, sorted=False)
            rows = rows[kept]
        queries, outputs = gather_rows(tables.queries, rows), gather_rows(tables.outputs, rows)
        near = near + first_order(queries, outputs, jacobian)
    return rows[near.topk(count, sorted=False).indices]


def first_order(queries: Tensor, outputs: Tensor, jacobian: Tensor) -> Tensor:
    """What the target's part of the queries adds to scores of T items, to first order: [T].

    queries and outputs [H, T, d], jacobian [H, d, d].
    """
    added: Tensor = torch.linalg.vecdot(queries @ jacobian, outputs).sum(0)
    return added
