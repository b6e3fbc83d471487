"""Clustered attention: very many rows, of which few matter, to an error that the caller states.

A query is answered by the moment expansion of few large clusters, at a cost that does not depend on
the number of rows. Where the estimated error is larger than allowed, the query goes on to smaller
clusters, to clusters attended row by row, and at last to every row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.attention.clustered.cluster_tree import ClusterTree
from models.attention.clustered.moment_expansion import ClusteredAttention, attend_by_moments
from models.attention.partial_softmax import PartialSoftmax, attend_blocks, merge_partials

MAX_ERROR = 0.01
_GAIN = 1.75  # by which twice as many clusters lessen the error, about
_REPAIRABLE = 10.0  # times the allowed error: the most that exact clusters still mend
_SMALL = 200  # rows of a cluster, of which so few are attended sooner than clusters are chosen
_MAX_RATIO = 1e6  # of an error to the allowed one: larger ratios are treated alike
_GROUPS = 4  # times as many exact clusters for the next group of targets
_GATHER_COST = 64  # gathering one in so many clusters takes as long as attending to every row


@torch.inference_mode()
def attend_clusters(
    tree: ClusterTree,
    query: Tensor,
    *,
    recent_partial: PartialSoftmax | None = None,
    max_error: float = MAX_ERROR,
    order: int = 2,
) -> ClusteredAttention:
    """Attend over all rows of a tree.

    Args:
        tree: the rows.
        query: [H, T, d].
        recent_partial: attention over other rows of the same memory, merged with these.
        max_error: largest stated error allowed for any head and target; 0 attends every row.
        order: of the moments, 2; or 1 as a reference, which states its error and does not refine.
    """
    heads, targets, dim = query.shape
    if recent_partial is None:
        recent_partial = PartialSoftmax.empty(heads, targets, tree.table.values.shape[2])
    if max_error <= 0:
        return _attend_all(tree, slice(None), query, recent_partial)
    scaled = query / math.sqrt(dim)
    found = attend_by_moments(tree, 0, slice(None), scaled, recent_partial, order=order)
    if order == 2:
        for head in range(heads):
            _refine(tree, head, query[head], scaled[head], recent_partial, max_error, found)
    return found


def _refine(
    tree: ClusterTree,
    head: int,
    query: Tensor,
    scaled: Tensor,
    recent_partial: PartialSoftmax,
    max_error: float,
    found: ClusteredAttention,
) -> None:
    """Replace in `found` the targets of one head whose error is too large."""
    only = slice(head, head + 1)

    def inexact() -> Tensor:
        return (found.error[head] > max_error).nonzero().flatten()

    def recent(targets: Tensor) -> PartialSoftmax:
        return PartialSoftmax(*(part[only, targets] for part in recent_partial))

    def store(targets: Tensor, better: ClusteredAttention) -> None:
        parts = zip((*found.partial, *found[1:]), (*better.partial, *better[1:]), strict=True)
        for old, new in parts:
            old[head, targets] = new[0]

    def attend_every_row(targets: Tensor) -> None:
        store(targets, _attend_all(tree, only, query[None, targets], recent(targets)))

    last, level = len(tree.levels) - 1, 0
    repairable = _REPAIRABLE if tree.levels[last].size > _SMALL else 1.0
    while level < last and len(left := inexact()):
        ratio = (found.error[head, left] / max_error).clamp(max=_MAX_RATIO)
        hopeless = left[ratio > repairable * _GAIN ** (last - level)]
        if len(hopeless):
            attend_every_row(hopeless)
            continue
        # Over as many levels at once as the error suggests.
        level = min(last, level + max(1, math.ceil(math.log(float(ratio.median()), _GAIN))))
        tolerance = max_error if level == last else None
        store(
            left,
            attend_by_moments(
                tree, level, only, scaled[None, left], recent(left), tolerance=tolerance
            ),
        )
    if not last and len(left := inexact()):  # a tree of one level has few rows
        attend_every_row(left)
    most, count = tree.levels[-1].log_weight.shape[1] // _GATHER_COST, _GROUPS
    while len(left := inexact()):
        some = left[found.clusters_needed[head, left] <= count] if count <= most else left
        if count > most:
            attend_every_row(some)
        elif len(some):
            better = attend_by_moments(
                tree, last, only, scaled[None, some], recent(some), exact_clusters=count
            )
            store(some, better)
            found.clusters_needed[head, some] = math.inf  # if that is not enough, every row
        count *= _GROUPS


def _attend_all(
    tree: ClusterTree, heads: slice, query: Tensor, recent_partial: PartialSoftmax
) -> ClusteredAttention:
    partial = merge_partials(recent_partial, attend_blocks(query, tree.blocks(heads)))
    return ClusteredAttention.exact(partial, len(tree))
