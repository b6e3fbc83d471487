"""The coarse step: items by their attention to first order in the target's part of the query.

The query of a target is the user's part plus the target's. To first order in the latter, the
attention part of item c is

    ⟨r_u, x_c⟩ + Σ_h q_cʰ Jʰ o_cʰ

with one readout r_u and one Jacobian J of the user's part of the queries for all items: products
with the item tables instead of a softmax for each item. Of 600 users of MovieLens 1M, whose model
had learned for one epoch, the first 20 of exact scores were among 155 items at most, and among 905
by ⟨r_u, x_c⟩ alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.attention.kv_memory import gather_rows
from models.recommender.target_attention import ItemTables

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
    """Return the `count` rows [count] of the largest scores to first order, in no order.

    Args:
        tables: of all items.
        rows: of the items that are compared, int64 [T].
        near: their scores [T], whose attention part is ⟨r_u, x_c⟩; -inf leaves an item out.
        jacobian: J of each head, [H, d, d], from `query_jacobian` of the user's part; None leaves
            the scores as they are.
        count: at most T.
        compared: how many items of the largest scores are compared to first order, at least
            `count`.
    """
    if jacobian is not None:
        if len(rows) > compared:
            near, kept = near.topk(compared, sorted=False)
            rows = rows[kept]
        queries, outputs = gather_rows(tables.queries, rows), gather_rows(tables.outputs, rows)
        near = near + first_order(queries, outputs, jacobian)
    return rows[near.topk(count, sorted=False).indices]


def first_order(queries: Tensor, outputs: Tensor, jacobian: Tensor) -> Tensor:
    """Return what the target's part of the queries adds to scores of T items, to first order: [T].

    Args:
        queries: of the items, [H, T, d].
        outputs: likewise.
        jacobian: J of each head, [H, d, d].
    """
    added: Tensor = torch.linalg.vecdot(queries @ jacobian, outputs).sum(0)
    return added
