"""One way to attend over any memory: `attend(query, memory, options)`.

| options.mode | rows of a memory that are attended |
|---|---|
| exact | every row |
| coarse | for each head and target the k rows of largest q·k/√d + b, which FAISS names |
| auto | every row; of very many, the summaries of FAISS's lists and as many rows as needed |

The softmax over k rows is not the softmax over all of them: how much of the full one they hold is
part of the answer, as their mass. H heads, T targets, n near rows; a query is [H, T, d].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from models.attention import attend as reference
from models.attention.attend import AttentionOptions
from models.attention.partial_softmax import (
    LOWEST,
    Attended,
    KVBlock,
    PartialSoftmax,
    attend_blocks,
)
from models.index.ann_index import CoarseIndex, IndexKind, build_index

Indexes = Sequence[CoarseIndex]  # one for each head
_GATHERED = 1 << 22  # numbers at most that rows gathered for some targets have: 16 MiB
_SAME = 1e-4  # relative difference of two scores that is nothing but rounding


class FarRows(Protocol):
    """Very many rows beside the near ones, attended at temperature 1. A place is one of them."""

    def __len__(self) -> int: ...

    def attend(
        self, query: Tensor, near: PartialSoftmax, options: AttentionOptions, own: Tensor | None
    ) -> Attended:
        """Attend over these rows and the near ones, which `scanned` does not count."""
        ...

    def nearest(self, query: Tensor, count: int, probes: int | None) -> Tensor:
        """Return places int64 [H, T, K], the `count` of largest score among them; -1 = none."""
        ...

    def gather(self, places: Tensor) -> KVBlock:
        """Return keys [H, T, K, d], values [H, T, K, d_v] and bias [H, T, K] of places."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Rows to attend over: near ones, and very many far ones, numbered after these."""

    near: KVBlock  # keys [H, n, d]; its mask [T, n] hides few rows of a target
    far: FarRows | None = None
    own: Tensor | None = None  # int64 [T] a place that each target does not see; -1 = none
    indexes: Callable[[IndexKind], Indexes] | None = None  # of the near rows; None = to build


def attend(query: Tensor, memory: Memory, options: AttentionOptions) -> Attended:
    """Attend by queries [H, T, d]; a target that sees nothing has a zero context and mass 1.

    Raises ValueError for far rows by another softmax than that at temperature 1.
    """
    near, far = memory.near, memory.far
    if far is not None and (options.hard or options.temperature != 1):
        raise ValueError("options: far rows are attended by the softmax at temperature 1")
    if options.mode == "coarse":
        return _attend_retrieved(query, memory, options)
    partial = attend_near(query, near, options)
    count = near.keys.shape[1]
    if far is None:
        return Attended.exact(partial, count)
    attended = far.attend(query, partial, options, memory.own)
    return attended._replace(scanned=attended.scanned + count)


def attend_near(query: Tensor, near: KVBlock, options: AttentionOptions) -> PartialSoftmax:
    """Attend over every row of a block, by the softmax or the hard attention of the options."""
    if not near.keys.shape[1]:
        return PartialSoftmax.empty(query.shape[0], query.shape[1], near.values.shape[2])
    if options.hard:
        bias, visible = near.bias[:, None], near.visible
        found = reference.attend(
            query, near.keys, near.values, bias=bias, visible=visible, hard=True
        )
        best = reference.logits(query, near.keys, bias=bias, visible=visible).amax(-1)
        return PartialSoftmax(found.context, best.clamp(min=LOWEST))
    if options.temperature == 1:
        return attend_blocks(query, [near])
    biased = near._replace(bias=near.bias / options.temperature)
    return attend_blocks(query / options.temperature, [biased])


def retrieve(query: Tensor, memory: Memory, options: AttentionOptions) -> Tensor:
    """Name the rows int64 [H, T, ≤ k] of largest score, ascending, then -1.

    FAISS orders by q·k + √d·b, as the softmax by q·k/√d + b. All rows are compared, or with
    `probes` only those in this number of its inverted lists.
    """
    near, far, k = memory.near, memory.far, options.rows_kept
    count = near.keys.shape[1]
    more = 0 if near.visible is None or not count else int((~near.visible).sum(1).max())
    rows = torch.zeros(*query.shape[:2], 0, dtype=torch.int64)
    if count:
        kind: IndexKind = "flat" if options.probes is None else "ivf"
        indexes = index_heads(near, kind) if memory.indexes is None else memory.indexes(kind)
        rows = search_heads(indexes, query, min(k + more, count), options.probes)
        if more and near.visible is not None:
            targets = torch.arange(query.shape[1])[:, None]
            rows = rows.masked_fill(~near.visible[targets, rows.clamp(min=0)], -1)
            rows = keep_first(rows, min(k, count))
    if far is not None:
        found = far.nearest(query, k + 1, options.probes)
        if memory.own is not None:
            found = found.masked_fill(found == memory.own[:, None], -1)
        rows = torch.cat([rows, torch.where(found < 0, -1, found + count)], 2)
    if rows.shape[2] > k:
        parts = _split(query, memory, rows.shape[2])
        scores = torch.cat([_scores(query[:, at], _gather(memory, rows[:, at])) for at in parts], 1)
        best = scores.topk(k, 2)
        rows = rows.gather(2, best.indices).masked_fill(best.values == -torch.inf, -1)
    last = torch.iinfo(torch.int64).max
    # Ascending, so that ties of the hard attention go to the lowest row, as over all rows.
    rows = rows.masked_fill(rows < 0, last).sort(2).values
    return rows.masked_fill(rows == last, -1)


def keep_first(rows: Tensor, count: int) -> Tensor:
    """Move -1 among rows [H, T, K] behind all others, and keep the first `count`."""
    return rows.gather(2, (rows < 0).sort(dim=2, stable=True).indices[..., :count])


def as_mask(rows: Tensor, count: int) -> Tensor:
    """Mark rows [H, T, k], -1 = none, among the first `count`: bool [H, T, count]."""
    mask = torch.zeros(*rows.shape[:2], count + 1, dtype=torch.bool)
    inside = (rows >= 0) & (rows < count)
    return mask.scatter_(2, torch.where(inside, rows, count), True)[..., :count]


def index_heads(block: KVBlock, kind: IndexKind) -> Indexes:
    """Build the index of each head of a block, with the bias as one more dimension of its keys."""
    keys, scale = block.keys.detach(), block.keys.shape[2] ** 0.5
    return tuple(
        build_index(kind, np.ascontiguousarray(own.numpy()), bias=(bias * scale).numpy())
        for own, bias in zip(keys, block.bias.detach(), strict=True)
    )


def search_heads(indexes: Indexes, query: Tensor, count: int, probes: int | None) -> Tensor:
    """Search the index of each head by its queries [H, T, d]: rows int64 [H, T, count]."""
    asked = query.detach().numpy()
    found = [
        index.search(own, count, probes=probes) for index, own in zip(indexes, asked, strict=True)
    ]
    return torch.from_numpy(np.stack(found))


def _attend_retrieved(query: Tensor, memory: Memory, options: AttentionOptions) -> Attended:
    rows = retrieve(query, memory, options)
    if not rows.shape[2]:
        width = memory.near.values.shape[2]
        nothing = PartialSoftmax.empty(query.shape[0], query.shape[1], width)
        return Attended.exact(nothing, 0)._replace(rows=rows)
    whole = attend(query, memory, replace(options, mode="auto")).partial.logsumexp
    parts = _split(query, memory, rows.shape[2])
    return Attended.concat(
        [_attend_rows(query[:, at], memory, rows[:, at], whole[:, at], options) for at in parts]
    )


def _attend_rows(
    query: Tensor, memory: Memory, rows: Tensor, whole: Tensor, options: AttentionOptions
) -> Attended:
    """Attend over rows [H, T, k]; `whole` [H, T] is the log-sum-exp over all."""
    block = _gather(memory, rows)
    found = reference.attend(
        query[:, :, None],
        block.keys,
        block.values,
        bias=block.bias[:, :, None],
        temperature=options.temperature,
        hard=options.hard,
    )
    scores = _scores(query, block)
    if options.hard:
        held = scores.amax(-1).clamp(min=LOWEST)
        mass = (held >= whole - _SAME * (1 + whole.abs())).float()
    else:
        held = (scores / options.temperature).logsumexp(-1).clamp(min=LOWEST)
        mass = (held - whole).exp().clamp(max=1)
    partial = PartialSoftmax(found.context[:, :, 0], held)
    zero = torch.zeros_like(held)
    return Attended(partial, mass, zero, (rows >= 0).sum(2).float(), rows)


def _split(query: Tensor, memory: Memory, rows: int) -> Iterator[slice]:
    """Split targets so that what is gathered for `rows` rows of each stays small."""
    width = query.shape[0] * rows * (query.shape[2] + memory.near.values.shape[2])
    step = max(1, _GATHERED // max(1, width))
    return (slice(at, at + step) for at in range(0, max(1, query.shape[1]), step))


def _scores(query: Tensor, block: KVBlock) -> Tensor:
    """Score gathered rows [H, T, k, d] by their own target."""
    return reference.logits(query[:, :, None], block.keys, bias=block.bias[:, :, None])[:, :, 0]


def _gather(memory: Memory, rows: Tensor) -> KVBlock:
    """Gather keys [H, T, k, d], values and bias [H, T, k] of rows; -inf for -1."""
    near, far = memory.near, memory.far
    head, at = torch.arange(len(rows))[:, None, None], rows.clamp(min=0)
    count = near.keys.shape[1]
    inside = at.clamp(max=max(0, count - 1))
    block = None
    if count:
        block = KVBlock(*(each[head, inside] for each in (near.keys, near.values, near.bias)))
    if far is not None:
        others = far.gather((at - count).clamp(min=0))
        if block is not None:
            is_near = at < count
            keys, values = (
                torch.where(is_near[..., None], one, other)
                for one, other in zip(block[:2], others[:2], strict=True)
            )
            others = KVBlock(keys, values, torch.where(is_near, block.bias, others.bias))
        block = others
    if block is None:
        block = KVBlock(*(each[:, :0][:, None] for each in (near.keys, near.values, near.bias)))
    return block._replace(bias=block.bias.masked_fill(rows < 0, -torch.inf))
