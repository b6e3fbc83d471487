"""Sparse rows of item-to-item matrices: K entries of each of N items, weighted sums of some rows.

Such a matrix is `items` int32 [N, K], the column of each entry, N where a row has fewer, and
`values` float32 [N, K], 0 there. Rows are int64 [n]; row -1 is an item outside the matrix, whose
entries count for nothing. Weights are float [n].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from models.data.row_sets import sorted_union


def row_sums(items: Tensor, values: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of rows, [N]."""
    size = len(items)
    chosen = rows.clamp(min=0)
    entries = values.index_select(0, chosen) * (weights * (rows >= 0))[:, None]
    total = values.new_zeros(size + 1)
    total.index_add_(0, items.index_select(0, chosen).flatten(), entries.flatten())
    return total[:size]


def row_products(
    items: Tensor, values: Tensor, rows: Tensor, weights: Tensor, targets: Tensor
) -> Tensor:
    """Return each row's addend to the sums of targets, int64 [T]: [T, n].

    A target of -1 is no column. All tensors must be on the CPU: few of the entries are of a
    target, and NumPy finds these in a quarter of the time that torch takes to add up all.
    """
    columns, kept = items.numpy(), values.numpy()
    row, target = rows.numpy(), targets.numpy()
    # The place of each column among the targets; the last is of all others. A target of -1 shares
    # the entry N with what fills short rows up, which is 0.
    places = np.full(len(columns) + 1, len(target), np.int32)
    places[target] = np.arange(len(target), dtype=np.int32)
    chosen = np.maximum(row, 0)
    at = places.take(columns.take(chosen, axis=0))  # (n, K)
    place, entry = np.divmod(np.flatnonzero(at.ravel() < len(target)), columns.shape[1])
    weighted = kept[chosen[place], entry] * (weights.numpy() * (row >= 0))[place]
    products = np.bincount(
        at[place, entry] * len(row) + place, weighted, minlength=len(target) * len(row)
    ).reshape(len(target), len(row))
    return torch.from_numpy(products[places[target]].astype(kept.dtype))


def top_items(items: Tensor, total: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the columns [≤ count] with the largest `total` [N] above 0, in descending order.

    `total` is 0 where none of the rows has an entry.
    """
    near = items.index_select(0, rows.clamp(min=0)).flatten()
    if len(near) < len(total):  # in a large catalogue hardly any item has one
        reached = torch.from_numpy(sorted_union(near[near < len(total)].long().numpy()))
    else:
        reached = torch.arange(len(total))
    best, at = torch.topk(total[reached], min(count, len(reached)))
    return reached[at[best > 0]]
