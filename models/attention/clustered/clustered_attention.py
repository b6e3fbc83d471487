"""Attention over very many rows of which few matter, to an error that the caller states.

A query is answered by the expansion of few large cells
(`models.attention.clustered.moment_expansion`), at a cost that does not depend on the number of
rows. Where the error so estimated is larger than asked for, the query goes on to smaller cells, to
cells opened, that is attended row by row, and at last to every row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.attention.clustered.cluster_tree import ClusterTree
from models.attention.clustered.moment_expansion import ClusteredAttention, attend_by_moments
from models.attention.partial_softmax import PartialSoftmax, attend_blocks, merge_partials

MAX_ERROR = 0.01
_GAIN = 1.75  # by which twice as many cells lessen the error, about
_HOPE = 10.0  # times the error that is wanted: what opening cells of the last level may still mend
_SMALL = 200  # rows of a cell, of which so few are attended in less time than cells are opened in
_HOPELESS = 1e6  # times the error that is wanted: as far off as matters
_GROUPS = 4  # times as many cells are opened for the next group of targets
_WORTH = 64  # gathering the rows of one cell in so many takes as long as attending to every row


@torch.inference_mode()
def attend_clusters(
    tree: ClusterTree,
    query: Tensor,
    *,
    recent_partial: PartialSoftmax | None = None,
    max_error: float = MAX_ERROR,
    order: int = 2,
) -> ClusteredAttention:
    """Attend over all rows.

    Args:
        cells: the rows.
        query: [H, T, d].
        beside: attention over other rows of the same memory, put together with this one.
        max_error: that the stated error of any head and target may have; 0 attends every row.
        order: 2; or 1 as a reference, which states its error and looks no closer.
    """
    heads, targets, width = query.shape
    if recent_partial is None:
        recent_partial = PartialSoftmax.empty(heads, targets, tree.table.values.shape[2])
    if max_error <= 0:
        return _every(tree, slice(None), query, recent_partial)
    asked = query / math.sqrt(width)
    tail = attend_by_moments(tree, 0, slice(None), asked, recent_partial, order=order)
    if order == 2:
        for head in range(heads):
            _look_closer(tree, head, query[head], asked[head], recent_partial, max_error, tail)
    return tail


def attend_all_rows(
    tree: ClusterTree, query: Tensor, recent_partial: PartialSoftmax | None = None
) -> PartialSoftmax:
    """The same over every row, one by one: the reference."""
    found = attend_blocks(query, tree.blocks(slice(None)))
    return found if recent_partial is None else merge_partials(recent_partial, found)


def _look_closer(
    cells: ClusterTree,
    head: int,
    query: Tensor,
    asked: Tensor,
    beside: PartialSoftmax,
    max_error: float,
    tail: ClusteredAttention,
) -> None:
    """Answer anew, into `tail`, the targets of one head whose error is too large."""
    only = slice(head, head + 1)

    def wanting() -> Tensor:
        return (tail.error[head] > max_error).nonzero().flatten()

    def near(left: Tensor) -> PartialSoftmax:
        return PartialSoftmax(*(part[only, left] for part in beside))

    def keep(left: Tensor, found: ClusteredAttention) -> None:
        for kept, new in zip((*tail.partial, *tail[1:]), (*found.partial, *found[1:]), strict=True):
            kept[head, left] = new[0]

    last, number = len(cells.levels) - 1, 0
    hope = _HOPE if cells.levels[last].size > _SMALL else 1.0
    while number < last and len(left := wanting()):
        off = (tail.error[head, left] / max_error).clamp(max=_HOPELESS)
        lost = left[off > hope * _GAIN ** (last - number)]
        if len(lost):
            keep(lost, _every(cells, only, query[None, lost], near(lost)))
            continue
        # Over as many levels at once as the error says.
        number = min(last, number + max(1, math.ceil(math.log(float(off.median()), _GAIN))))
        aim = max_error if number == last else None
        keep(
            left,
            attend_by_moments(cells, number, only, asked[None, left], near(left), tolerance=aim),
        )
    if not last and len(left := wanting()):  # so few rows are soon attended
        keep(left, _every(cells, only, query[None, left], near(left)))
    most, opened = cells.levels[-1].log_weight.shape[1] // _WORTH, _GROUPS
    while len(left := wanting()):
        some = left[tail.clusters_needed[head, left] <= opened] if opened <= most else left
        if opened > most:
            keep(some, _every(cells, only, query[None, some], near(some)))
        elif len(some):
            found = attend_by_moments(
                cells, last, only, asked[None, some], near(some), exact_clusters=opened
            )
            keep(some, found)
            tail.clusters_needed[head, some] = math.inf  # were that not enough, then every row
        opened *= _GROUPS


def _every(
    cells: ClusterTree, heads: slice, query: Tensor, beside: PartialSoftmax
) -> ClusteredAttention:
    partial = merge_partials(beside, attend_blocks(query, cells.blocks(heads)))
    zero = torch.zeros_like(partial.logsumexp)
    return ClusteredAttention(partial, zero, zero + len(cells), partial.logsumexp.clone(), zero)
