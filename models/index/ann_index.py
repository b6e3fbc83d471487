"""Approximate nearest-neighbour index: the k rows whose keys have the largest score with a query.

The score is the inner product, plus a bias. An index never changes once built: adding to a FAISS
index while it is searched crashes, so a new one is built and swapped in by reference. Parameters of
a search travel with that search, so any number may run at once.

The caller chooses how many threads FAISS uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch  # noqa: F401  # before faiss: each carries an OpenMP runtime, and the order is ours
from numpy.typing import NDArray

from models.index import faiss_structures
from models.index.faiss_structures import StructureCache
from models.index.unit_vectors import Floats

import faiss  # isort: skip

IndexKind = Literal["flat", "ivf", "pq"]
Mask = NDArray[np.bool_]
RowArray = NDArray[np.int64]

_faiss: Any = faiss  # its type stubs leave out selectors and search parameters

# With so few rows allowed, or so small a share of them, all are scanned: it costs little, and
# lists answer badly when most of their rows are filtered out.
_NARROW_ROWS = 2048
_NARROW_SHARE = 1 / 20
_RERANKED, _MIN_RERANKED = 4, 1_000  # codes re-ranked exactly: for each row wanted, and at least
_BLOCK = 65_536  # rows checked at once
_RERANK_BLOCK = 1 << 22  # floats gathered at once when codes are re-ranked exactly: 16 MiB


@dataclass(frozen=True, slots=True, eq=False)
class CoarseIndex:
    """An immutable index of keys, from `build_index`; safe to search from many threads."""

    kind: IndexKind
    dim: int  # of a key and of a query
    points: Floats  # [n, dim] the keys; [n, dim + 1] with their bias, but for pq
    bias_column: Floats | None  # [n] the bias of pq: FAISS copies its points
    hidden: Mask | None  # [n] rows with a bias of -inf
    index: Any  # faiss.Index; None for flat, and when there are no rows

    def __len__(self) -> int:
        return len(self.points)

    @property
    def nbytes(self) -> int:
        """Bytes held; FAISS copies the points that it does not scan."""
        copied = self.points.nbytes + 8 * len(self) if self.index is not None else 0
        columns = (self.bias_column, self.hidden)
        return self.points.nbytes + copied + sum(x.nbytes for x in columns if x is not None)

    def search(
        self,
        queries: Floats,
        k: int,
        *,
        allow: Mask | None = None,
        probes: int | None = None,
        boost: Floats | None = None,
        least: int | None = None,
    ) -> RowArray:
        """Find the k best rows for each query, [Q, k], best first; -1 where fewer were found.

        Few allowed rows are scanned exactly, and so is everything when k covers it, unless `probes`
        says which lists are scanned.

        Args:
            queries: float32 [Q, d].
            k: at least 1; more than there are rows is padded with -1.
            allow: bool [n], True = may be found; None = all.
            probes: search effort: clusters scanned (ivf), codes re-ranked exactly (pq); flat
                ignores it. None = a default that grows as `allow` narrows.
            boost: float32 [n], added to the scores; of a pq with a bias alone.
            least: the fewest allowed rows that share a boost, for as much effort as if these alone
                were allowed; None = all of them do.

        Raises:
            ValueError: naming the argument that is out of range, misshapen or not finite.
        """
        if boost is not None and self.bias_column is None:
            raise ValueError("boost: needs an index of kind 'pq' with a bias")
        if k < 1:
            raise ValueError(f"k: must be at least 1, got {k}")
        if probes is not None and probes < 1:
            raise ValueError(f"probes: must be at least 1, got {probes}")
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(f"queries: must be [Q, {self.dim}], got {list(queries.shape)}")
        points = np.ascontiguousarray(queries, dtype=np.float32)
        if not np.isfinite(points).all():
            raise ValueError("queries: must be finite")
        if self.bias_column is not None or self.points.shape[1] > self.dim:
            points = np.hstack([points, np.ones((len(points), 1), np.float32)])

        n = len(self)
        if allow is not None and (allow.dtype != np.bool_ or allow.shape != (n,)):
            raise ValueError(f"allow: must be bool [{n}], got {allow.dtype} {list(allow.shape)}")
        allowed = allow
        if self.hidden is not None:
            allowed = ~self.hidden if allow is None else allow & ~self.hidden
        count = n if allowed is None else int(np.count_nonzero(allowed))
        found = np.full((len(points), k), -1, np.int64)
        if count == 0 or len(points) == 0:
            return found
        narrow = allow is not None and count <= max(_NARROW_ROWS, n * _NARROW_SHARE)
        covers = k >= count and (probes is None or self.kind == "pq")
        if self.kind == "flat" or narrow or covers:
            rows = self._scan(points, min(k, count), allowed, boost)
        elif self.kind == "pq":
            rows = self._search_codes(points, k, allowed, probes, n / (least or count), boost)
        else:
            rows = self._search_lists(points, k, allowed, probes, n / count)
        found[:, : rows.shape[1]] = rows
        return found

    def _scan(
        self, queries: Floats, k: int, allowed: Mask | None, boost: Floats | None
    ) -> RowArray:
        """Compare every row that is allowed."""
        chosen = slice(None) if allowed is None else np.flatnonzero(allowed)
        points = self.points[chosen]
        if self.bias_column is not None:
            bias = self.bias_column[chosen]
            bias = bias if boost is None else bias + boost[chosen]
            points = np.column_stack([points, bias])
        _, rows = faiss.knn(queries, points, k, metric=faiss.METRIC_INNER_PRODUCT)
        return rows if isinstance(chosen, slice) else chosen[rows]

    # Below, `widen` is how many rows there are for each one allowed.

    def _search_codes(
        self,
        queries: Floats,
        k: int,
        allowed: Mask | None,
        probes: int | None,
        widen: float,
        boost: Floats | None,
    ) -> RowArray:
        """Re-rank the rows of the best codes by their points."""
        wanted = max(k, probes or max(_RERANKED * k, _MIN_RERANKED))
        ranked = min(len(self), math.ceil(wanted * widen))
        _, rows = self.index.search(faiss_structures.pad_to_even(queries), ranked)
        if allowed is not None:  # its scan cannot skip rows
            rows = np.where(allowed.take(rows) & (rows >= 0), rows, -1)
        scores = np.empty(rows.shape, np.float32)
        block = max(1, _RERANK_BLOCK // (rows.shape[1] * queries.shape[1]))
        for at in range(0, len(queries), block):
            part = slice(at, at + block)
            # `take` copies whole rows, in half the time of an index in brackets.
            points = self.points.take(rows[part], axis=0)
            scores[part] = (points @ queries[part, : self.dim, None])[..., 0]
            if self.bias_column is not None:
                scores[part] += self.bias_column.take(rows[part])
            if boost is not None:
                scores[part] += boost.take(rows[part])
        scores[rows < 0] = -np.inf
        if scores.shape[1] > 4 * k:  # to sort all of them would take longer than to compare them
            best = np.sort(np.argpartition(-scores, k - 1, axis=1)[:, :k], axis=1)
            rows, scores = (np.take_along_axis(each, best, 1) for each in (rows, scores))
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(rows, best, 1)

    def _search_lists(
        self, queries: Floats, k: int, allowed: Mask | None, probes: int | None, widen: float
    ) -> RowArray:
        """Compare the rows of the nearest clusters."""
        selector = None
        if allowed is not None:
            selector = _faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        lists = self.index.nlist
        effort = min(lists, probes or math.ceil(max(32, lists // 16) * widen))
        params = _faiss.SearchParametersIVF(sel=selector, nprobe=effort)
        rows: RowArray = self.index.search(queries, k, params=params)[1]
        return rows


def build_index(
    kind: IndexKind,
    keys: Floats,
    *,
    bias: Floats | None = None,
    reuse_clusters: CoarseIndex | None = None,
    cache: StructureCache | None = None,
) -> CoarseIndex:
    """Index keys under q·k + bias.

    The same arguments give the same index, whatever the number of threads.

    Args:
        kind: `flat` is exact. `ivf` scans the √n clusters nearest to the query. `pq` scans short
            codes of all, then re-ranks the best exactly.
        keys: float32 [n, d], finite; n may be 0. The index may share them: never write to them.
        bias: float32 [n]. It enters as one more dimension, (k, b)·(q, 1) = q·k + b, so the order
            stays exact. -inf keeps a row out of every answer.
        reuse_clusters: an earlier index of much the same keys, whose clusters (ivf) are reused.
        cache: of what was built before; an index of reused clusters is not looked for there.

    Raises:
        ValueError: naming the argument that is unknown, misshapen or not finite.
    """
    if kind not in get_args(IndexKind):
        raise ValueError(f"kind: must be one of {', '.join(get_args(IndexKind))}, got {kind!r}")
    if keys.ndim != 2 or keys.shape[1] == 0:
        raise ValueError(f"keys: must be [n, d] with d ≥ 1, got {list(keys.shape)}")
    points, dim = np.ascontiguousarray(keys, dtype=np.float32), keys.shape[1]
    column = hidden = None
    if bias is not None:
        if bias.shape != (len(points),):
            raise ValueError(f"bias: must be [{len(points)}], got {list(bias.shape)}")
        if np.isnan(bias).any() or np.isposinf(bias).any():
            raise ValueError("bias: must be finite or -inf")
        hidden = np.isneginf(bias)
        column = np.where(hidden, 0.0, bias).astype(np.float32)
        hidden = hidden if hidden.any() else None
        if kind != "pq":
            points, column = np.column_stack([points, column]), None
    index = None
    if kind == "flat":
        _check_finite(points)
    elif len(points):
        earlier = None if reuse_clusters is None else reuse_clusters.index

        def build() -> Any:
            _check_finite(points)
            with faiss_structures.one_thread():
                if kind == "pq":
                    return faiss_structures.pq(points, column)
                return faiss_structures.ivf(points, earlier)

        if cache is None or (kind == "ivf" and earlier is not None):
            index = build()
        else:
            index = faiss_structures.cached(cache, kind, points, column, build)
    return CoarseIndex(kind, dim, points, column, hidden, index)


def _check_finite(points: Floats) -> None:
    """Raise ValueError where a coordinate is not finite.

    Points whose structure was found by their digest were checked when it was built.
    """
    if not all(np.isfinite(points[at : at + _BLOCK]).all() for at in range(0, len(points), _BLOCK)):
        raise ValueError("keys: must be finite")
