"""Two stages over one memory: a coarse index names k rows for each head, then exact attention.

The softmax over k rows is not the softmax over n. How much of the full one the k rows hold is
therefore part of the answer, estimated from a stratified sample of the others.

Shapes: T targets, H heads, n rows, k retrieved. A query is [T, H, d_k].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.attention.kv_memory import KeyValueMemory
from models.attention.memory_query import MemoryQuery
from models.attention.scorers import Scorer, cosine, scaled_dot
from models.attention.softmax_mass import estimate_mass
from models.index.ann_index import CoarseIndex, IndexKind, build_index
from models.index.unit_vectors import Floats, normalize_rows

_OVERSAMPLE = 4  # rows fetched for each one wanted, where the index does not order by the score


class RetrievedAttention(NamedTuple):
    """Attention of T targets over the rows that were retrieved for each head.

    weights: [T, H, k] rows sum to 1; all zero where nothing is visible.
    rows: [T, H, k] the memory row behind each weight, ascending; then -1 where fewer were found.
    context: [T, H, d_v] the weighted mean of the values.
    mass: [T, H] the share of the full softmax that these rows hold; may be estimated.
    """

    weights: Tensor
    rows: Tensor
    context: Tensor
    mass: Tensor


def index_heads(
    memory: KeyValueMemory, kind: IndexKind, *, score: Scorer = scaled_dot
) -> tuple[CoarseIndex, ...]:
    """Build one index for each head, ordering rows as `score` plus the memory's bias does.

    The additive score has no inner-product structure: its index orders by the scaled dot product,
    a proxy.
    """
    # The index orders by q·k + b', the softmax by q·k/√d + b: the same order when b' = √d·b.
    scale = 1.0 if score is cosine else math.sqrt(memory.keys.shape[2])
    indexes = []
    for head in range(memory.heads):
        bias = memory.head_bias(head)
        keys = _points(memory.keys[:, head], score)
        scaled = None if bias is None else (bias * scale).detach().cpu().numpy()
        indexes.append(build_index(kind, keys, bias=scaled))
    return tuple(indexes)


def attend_retrieved(
    query: Tensor,
    memory: KeyValueMemory,
    indexes: Sequence[CoarseIndex],
    k: int,
    *,
    score: Scorer = scaled_dot,
    temperature: float = 1.0,
    hard: bool = False,
    probes: int | None = None,
) -> RetrievedAttention:
    """Attend over the min(k, n) rows that each head's index names.

    With k ≥ n no index is searched and the result is that of `MemoryQuery.attend`.

    The index knows the dot product and the cosine. With another score, 4k rows are fetched and the
    k of highest logit attended: an approximation even over a flat index. A `hard` tie goes to the
    lowest row among those retrieved.

    Raises ValueError, naming the argument, when shapes do not fit or k < 1.
    """
    lookup = MemoryQuery(query, memory, score)
    targets, heads, n = query.shape[0], memory.heads, len(memory)
    if [len(index) for index in indexes] != [n] * heads:
        raise ValueError(f"indexes: must be {heads} of {n} rows each")
    if k >= n:
        weights, context = lookup.attend(temperature=temperature, hard=hard)
        rows = torch.arange(n, device=query.device).expand(targets, heads, n)
        return RetrievedAttention(weights, rows, context, weights.new_ones(targets, heads))

    direct = score is scaled_dot or score is cosine
    fetch = k if direct else _OVERSAMPLE * k
    each = [
        index.search(_points(query[:, head], score), fetch, probes=probes)
        for head, index in enumerate(indexes)
    ]
    rows = torch.from_numpy(np.stack(each, axis=1)).to(query.device)
    if not direct:
        with torch.no_grad():
            rows = rows.gather(2, lookup.logits_of_each(rows).topk(k, dim=2).indices)
    # Ascending, so that ties go to the lowest row as they do over all rows.
    rows = rows.masked_fill(rows < 0, n).sort(dim=2).values
    rows = rows.masked_fill(rows == n, -1)

    weights, context = lookup.attend_rows(rows, temperature=temperature, hard=hard)
    mass = estimate_mass(lookup, rows, temperature=temperature, hard=hard)
    return RetrievedAttention(weights, rows, context, mass)


def _points(vectors: Tensor, score: Scorer) -> Floats:
    """Vectors [n, d] as an index compares them: of unit length for the cosine."""
    points = np.ascontiguousarray(vectors.detach().cpu().numpy(), dtype=np.float32)
    return normalize_rows(points) if score is cosine else points
