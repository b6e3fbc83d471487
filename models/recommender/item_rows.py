"""Sparse rows of item-to-item matrices: K entries of each of N items, weighted sums of some rows.

Such a matrix is `items` int32 [N, K], the column of each entry, N where a row has fewer, and
`values` float32 [N, K], 0 there. Rows are int64 [n]; row -1 is an item outside the matrix, whose
entries count for nothing. Weights are float [n].
"""

from __future__ import annotations

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

    A target of -1 is no column.
    """
    chosen = rows.clamp(min=0)
    # The place of each column among the targets; the last is of all others. A target of -1 shares
    # the entry N with what fills short rows up, which is 0.
    places = torch.full((len(items) + 1,), len(targets))
    places[targets] = torch.arange(len(targets))
    products = values.new_zeros(len(rows), len(targets) + 1)
    columns = items.index_select(0, chosen)
    at = places.index_select(0, columns.flatten()).view_as(columns)
    products.scatter_add_(1, at, values.index_select(0, chosen))
    return (products * (weights * (rows >= 0))[:, None]).T[places[targets]]


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
