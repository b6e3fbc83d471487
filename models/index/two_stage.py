"""Two stages over one memory: a coarse index names k rows for each head, then exact attention.

The softmax over k rows is not the softmax over n. How much of the full one the k rows hold is
therefore part of the answer (`Attention.mass`), estimated from a stratified sample of the others.

Shapes: T targets, H heads, n rows, k retrieved. A query is [T, H, d_k]; `bias` and `visible` are
[n], or three-dimensional and broadcastable to [T, H, n].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from models.attention.attend import Attention, check_temperature
from models.attention.kv_memory import KeyValueMemory
from models.attention.memory_query import MemoryQuery
from models.attention.scorers import Scorer, cosine, scaled_dot
from models.attention.softmax_mass import estimate_mass
from models.index import ann_index
from models.index.ann_index import CoarseIndex, IndexKind, RowArray
from models.index.mips import Floats, Mask

_OVERSAMPLE = 4  # rows fetched for each one kept, where the index does not order by the true score
_SPARE = 256  # hidden rows a search may wade through before targets with other masks search apart


def index_heads(
    memory: KeyValueMemory,
    kind: IndexKind,
    *,
    score: Scorer = scaled_dot,
    seed: int = 0,
    lists: int | None = None,
    links: int = 32,
    construction: int = 80,
) -> tuple[CoarseIndex, ...]:
    """One index for each head, ordering rows as `score` plus the memory's bias does.

    The additive score has no inner-product structure: its index orders by the scaled dot product,
    a proxy, and needs queries and keys of one dimension. Other arguments as for `build_index`.
    """
    metric: ann_index.Metric = "cosine" if score is cosine else "dot"
    # The index orders by q·k + b', the softmax by q·k/√d + b: the same order when b' = √d·b.
    scale = 1.0 if score is cosine else math.sqrt(memory.keys.shape[2])
    found = []
    for head in range(memory.heads):
        bias = memory.head_bias(head)
        found.append(
            ann_index.build_index(
                kind,
                _numpy(memory.keys[:, head]),
                metric=metric,
                bias=None if bias is None else _numpy(bias * scale),
                seed=seed,
                lists=lists,
                links=links,
                construction=construction,
            )
        )
    return tuple(found)


def attend_exact(
    query: Tensor,
    memory: KeyValueMemory,
    *,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    score: Scorer = scaled_dot,
    temperature: float = 1.0,
    hard: bool = False,
) -> Attention:
    """Attend over every row of the memory: weights [T, H, n], context [T, H, d_v], mass 1.

    `bias` is added to the memory's own. Raises ValueError, naming the argument, when shapes do not
    fit.
    """
    lookup = MemoryQuery(query, memory, bias, visible, score)
    return lookup.attend(temperature=temperature, hard=hard)


def attend_retrieved(
    query: Tensor,
    memory: KeyValueMemory,
    indexes: Sequence[CoarseIndex],
    k: int,
    *,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    score: Scorer = scaled_dot,
    temperature: float = 1.0,
    hard: bool = False,
    probes: int | None = None,
) -> Attention:
    """Attend over the k rows that each head's index names, and over rows newer than the index.

    `rows` [T, H, k'] are ascending, then -1 where fewer were found (weight 0). k' = min(k, n), plus
    the rows appended to the memory since the indexes were built, which are always attended.
    With k ≥ n no index is asked and the result is that of `attend_exact`.

    The index knows the memory's bias, not `bias`; and only the dot product and the cosine. With a
    `bias`, or another score, 4k rows are fetched and the k of highest logit kept: an approximation
    even over a flat index. A `hard` tie goes to the lowest row among those retrieved.

    Raises ValueError, naming the argument, when shapes do not fit or k < 1.
    """
    lookup = MemoryQuery(query, memory, bias, visible, score)
    check_temperature(temperature)
    targets, heads, n = query.shape[0], memory.heads, len(memory)
    if k < 1:
        raise ValueError(f"k: must be at least 1, got {k}")
    if len(indexes) != heads:
        raise ValueError(f"indexes: {len(indexes)} for {heads} heads")
    if any(len(index) > n for index in indexes):
        raise ValueError(f"indexes: more rows than the memory's {n}")
    if k >= n:
        found = lookup.attend(temperature=temperature, hard=hard)
        return found._replace(rows=torch.arange(n, device=query.device).expand(targets, heads, n))

    direct = bias is None and (score is scaled_dot or score is cosine)
    fetch = k if direct else _OVERSAMPLE * k
    rows = _candidates(query, indexes, fetch, lookup.seen, probes).to(query.device)
    if not direct:
        with torch.no_grad():
            rows = rows.gather(2, lookup.logits_at(rows).topk(k, dim=2).indices)
    newer = [torch.arange(len(index), n, device=query.device) for index in indexes]
    if any(len(fresh) for fresh in newer):
        fresh = nn.utils.rnn.pad_sequence(newer, batch_first=True, padding_value=-1)  # (H, f)
        rows = torch.cat([rows, fresh.expand(targets, -1, -1)], dim=2)
    # Ascending, so that ties go to the lowest row as they do in `attend_exact`.
    rows = rows.masked_fill(rows < 0, n).sort(dim=2).values
    rows = rows.masked_fill(rows == n, -1)

    found = lookup.attend_rows(rows, temperature=temperature, hard=hard)
    mass = estimate_mass(lookup, rows, temperature=temperature, hard=hard)
    return found._replace(mass=mass.share)


def _candidates(
    query: Tensor,
    indexes: Sequence[CoarseIndex],
    k: int,
    seen: Tensor | None,
    probes: int | None,
) -> Tensor:
    """What each head's index names for each target: rows [T, H, k], -1 = none."""
    found = []
    for head, index in enumerate(indexes):
        queries = _numpy(query[:, head])
        if seen is None:
            found.append(index.search(queries, k, probes=probes).rows)
            continue
        mask = seen[:, min(head, seen.shape[1] - 1), : len(index)].cpu().numpy()
        found.append(_search(index, queries, k, mask, probes))
    return torch.from_numpy(np.stack(found, axis=1))


def _search(
    index: CoarseIndex, queries: Floats, k: int, mask: Mask, probes: int | None
) -> RowArray:
    """Rows [T, k] for queries [T, d] under a mask [T, n], or [1, n] for all."""
    if len(mask) == 1:
        return index.search(queries, k, allow=mask.reshape(-1), probes=probes).rows
    union: Mask = np.logical_or.reduce(mask, axis=0)
    barred = int((np.count_nonzero(union) - np.count_nonzero(mask, axis=1)).max(initial=0))
    if barred <= max(k, _SPARE):
        # Among the k + barred best rows that someone may see, each target may see k.
        rows = index.search(queries, k + barred, allow=union, probes=probes).rows
        good = (rows >= 0) & mask[np.arange(len(rows))[:, None], rows]
        first = np.argsort(~good, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(np.where(good, rows, -1), first, 1)
    _, group = np.unique(np.packbits(mask, axis=1), axis=0, return_inverse=True)
    rows = np.empty((len(queries), k), np.int64)
    for g in range(group.max() + 1):
        members = np.flatnonzero(group == g)
        allow = mask[members[:1]].reshape(-1)
        rows[members] = index.search(queries[members], k, allow=allow, probes=probes).rows
    return rows


def _numpy(x: Tensor) -> Floats:
    return np.ascontiguousarray(x.detach().cpu().numpy(), dtype=np.float32)
