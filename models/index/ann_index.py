"""Approximate nearest-neighbour index: the k rows whose keys have the largest score with a query.

One protocol over five FAISS structures; the score is the inner product or the cosine, plus a bias.
An index never changes once built: adding to a FAISS index while it is searched crashes, so a new
one is built and swapped in by reference. Parameters of a search travel with that search, so any
number may run at once.

The caller chooses how many threads FAISS uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch  # noqa: F401  # before faiss: each carries an OpenMP runtime, and the order is ours
from numpy.typing import NDArray

from models.index import faiss_structures
from models.index.mips import Floats, Mask, augment, centre_bias, equal_norms, normalize_rows

import faiss  # isort: skip

IndexKind = Literal["flat", "ivf", "pq", "hnsw", "lsh"]
Metric = Literal["dot", "cosine"]
RowArray = NDArray[np.int64]

_faiss: Any = faiss  # its type stubs leave out selectors and search parameters

# With so few rows allowed, or so small a share of them, all are scanned: it costs little, and
# graphs and lists answer badly when most of their rows are filtered out.
_NARROW_ROWS = 2048
_NARROW_SHARE = 1 / 20
_RERANKED, _MIN_RERANKED = 4, 1_000  # codes re-ranked exactly: for each row wanted, and at least
_BLOCK = 65_536  # rows checked at once
_RERANK_BLOCK = 1 << 22  # floats gathered at once when codes are re-ranked exactly: 16 MiB


class Candidates(NamedTuple):
    """The best rows of each query, best first.

    rows: int64 [Q, k], -1 where fewer than k were found.
    scores: float32 [Q, k], inner product or cosine plus the row's bias; -inf for a row of -1. An
        inverted file over many rows scores keys in half precision.
    """

    rows: RowArray
    scores: Floats


class CoarseIndex(Protocol):
    """An immutable index, safe to search from many threads."""

    def __len__(self) -> int: ...

    def search(
        self, queries: Floats, k: int, *, allow: Mask | None = None, probes: int | None = None
    ) -> Candidates:
        """Find the k best rows for each of queries [Q, d]; see `FaissIndex.search`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FaissIndex:
    """A FAISS structure over the keys of a memory, from `build_index`."""

    kind: IndexKind
    metric: Metric
    points: Floats  # [n, D] the keys as indexed: of unit length for cosine
    bias_column: Floats | None  # [n] their bias, where it is not in the points but indexed too
    offset: float | None  # taken from every bias, so that it adds spread and no length; None = none
    hidden: Mask | None  # [n] rows with a bias of -inf
    index: Any  # faiss.Index; for lsh, the encoder of points. None when there are no rows
    codes: Any  # faiss.IndexBinaryFlat of lsh; None otherwise

    def __len__(self) -> int:
        return len(self.points)

    @property
    def dim(self) -> int:
        """The dimension d of a query."""
        return int(self.points.shape[1]) - (self.offset is not None and self.bias_column is None)

    def search(
        self, queries: Floats, k: int, *, allow: Mask | None = None, probes: int | None = None
    ) -> Candidates:
        """Find the k best rows for each query.

        Few allowed rows are scanned exactly, and so is everything when k covers it.

        Args:
            queries: float32 [Q, d].
            k: at least 1; more than there are rows is padded with -1.
            allow: bool [n], True = may be found; None = all.
            probes: search effort: clusters scanned (ivf), efSearch (hnsw), codes re-ranked exactly
                (pq, lsh); flat ignores it. None = a default that grows as `allow` narrows.

        Raises:
            ValueError: naming the argument that is out of range, misshapen or not finite.
        """
        if k < 1:
            raise ValueError(f"k: must be at least 1, got {k}")
        if probes is not None and probes < 1:
            raise ValueError(f"probes: must be at least 1, got {probes}")
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(f"queries: must be [Q, {self.dim}], got {list(queries.shape)}")
        points = np.ascontiguousarray(queries, dtype=np.float32)
        if not np.isfinite(points).all():
            raise ValueError("queries: must be finite")
        if self.metric == "cosine":
            points = normalize_rows(points)
        if self.offset is not None:
            points = np.hstack([points, np.ones((len(points), 1), np.float32)])

        n = len(self)
        if allow is not None and (allow.dtype != np.bool_ or allow.shape != (n,)):
            raise ValueError(f"allow: must be bool [{n}], got {allow.dtype} {list(allow.shape)}")
        allowed = allow
        if self.hidden is not None:
            allowed = ~self.hidden if allow is None else allow & ~self.hidden
        count = n if allowed is None else int(np.count_nonzero(allowed))
        if count == 0 or len(points) == 0:
            return _padded(np.empty((len(points), 0), np.int64), None, k)
        narrow = allowed is not None and count <= max(_NARROW_ROWS, n * _NARROW_SHARE)
        if narrow or k >= count:
            chosen = None if allowed is None else np.flatnonzero(allowed)
            rows, scores = self._scan(points, min(k, count), chosen)
        else:
            rows, scores = self._approximate(points, k, allowed, probes, n / count)
        return _padded(rows, scores + np.float32(self.offset or 0.0), k)

    def _scan(self, queries: Floats, k: int, chosen: RowArray | None) -> tuple[RowArray, Floats]:
        """Compare every row, or every chosen one."""
        points = self._full_points(slice(None) if chosen is None else chosen)
        scores, rows = faiss.knn(queries, points, k, metric=faiss.METRIC_INNER_PRODUCT)
        return (rows if chosen is None else chosen[rows]), scores

    def _full_points(self, rows: RowArray | slice) -> Floats:
        """Points of some rows, with their bias as the last dimension."""
        if self.bias_column is None:
            return self.points[rows]
        return np.concatenate([self.points[rows], self.bias_column[rows][..., None]], -1)

    def _rerank(self, queries: Floats, rows: RowArray, k: int) -> tuple[RowArray, Floats]:
        """Keep the k best of rows [Q, m], by their points."""
        scores = np.empty(rows.shape, np.float32)
        block = max(1, _RERANK_BLOCK // (rows.shape[1] * queries.shape[1]))
        for at in range(0, len(queries), block):
            part = slice(at, at + block)
            own, width = queries[part], self.points.shape[1]
            scores[part] = (self.points[rows[part]] @ own[:, :width, None])[..., 0]
            if self.bias_column is not None:
                scores[part] += self.bias_column[rows[part]] * own[:, width:]
        scores[rows < 0] = -np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(rows, best, 1), np.take_along_axis(scores, best, 1)

    def _approximate(
        self, queries: Floats, k: int, allowed: Mask | None, probes: int | None, widen: float
    ) -> tuple[RowArray, Floats]:
        """Search the structure; `widen` is how many rows there are for each one allowed."""
        if self.kind == "pq":
            # Its scan cannot skip rows, so rows that are not allowed are dropped after it.
            wanted = max(k, probes or max(_RERANKED * k, _MIN_RERANKED))
            ranked = min(len(self), math.ceil(wanted * widen))
            _, rows = self.index.search(faiss_structures.pad_to_even(queries), ranked)
            if allowed is not None:
                rows = np.where(allowed[rows] & (rows >= 0), rows, -1)
            return self._rerank(queries, rows, k)
        selector = None
        if allowed is not None:
            selector = _faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        params = _faiss.SearchParameters(sel=selector)
        if self.kind == "lsh":
            ranked = max(k, min(len(self), probes or max(20 * k, 512)))
            codes = self.index.sa_encode(equal_norms(queries, query=True))
            _, rows = self.codes.search(codes, ranked, params=params)
            return self._rerank(queries, rows, k)
        if self.kind == "ivf":
            lists = self.index.nlist
            effort = probes or math.ceil(max(32, lists // 16) * widen)
            params = _faiss.SearchParametersIVF(sel=selector, nprobe=min(lists, effort))
        elif self.kind == "hnsw":
            effort = probes or math.ceil(max(256, 4 * k) * widen)
            effort = min(len(self), max(k, effort))
            params = _faiss.SearchParametersHNSW(sel=selector, efSearch=effort)
        scores, rows = self.index.search(queries, k, params=params)
        return rows, scores


def build_index(
    kind: IndexKind,
    keys: Floats,
    *,
    metric: Metric = "dot",
    bias: Floats | None = None,
    copy: bool = True,
    reuse_clusters: CoarseIndex | None = None,
) -> FaissIndex:
    """Index keys under q·k + bias or cos(q, k) + bias.

    The same arguments give the same index, whatever the number of threads.

    Args:
        kind: `flat` is exact. `ivf` scans the √n clusters nearest to the query. `pq` scans short
            codes of all, then re-ranks the best exactly. `hnsw` walks a graph. `lsh` compares the
            signs of random projections, then re-ranks the closest exactly.
        keys: float32 [n, d], finite; n may be 0.
        metric: `dot` or `cosine`; a zero vector has cosine 0 with everything.
        bias: float32 [n], in the units of the metric. It enters as one more dimension,
            (k, b)·(q, 1) = q·k + b, so the order stays exact. -inf keeps a row out of every answer.
        copy: False where `keys` are never written to, so that the index can share them.
        reuse_clusters: an earlier index of much the same keys, whose clusters (ivf) are reused.

    Raises:
        ValueError: naming the argument that is unknown, misshapen or not finite.
    """
    for name, given, known in (("kind", kind, IndexKind), ("metric", metric, Metric)):
        if given not in get_args(known):
            raise ValueError(f"{name}: must be one of {', '.join(get_args(known))}, got {given!r}")
    if keys.ndim != 2 or keys.shape[1] == 0:
        raise ValueError(f"keys: must be [n, d] with d ≥ 1, got {list(keys.shape)}")
    points = np.ascontiguousarray(keys, dtype=np.float32)
    if not all(np.isfinite(points[at : at + _BLOCK]).all() for at in range(0, len(points), _BLOCK)):
        raise ValueError("keys: must be finite")
    if metric == "cosine":
        points = normalize_rows(points)
    offset = hidden = column = None
    if bias is not None and kind in ("ivf", "pq"):
        # FAISS copies the points of these: the caller's array need not be extended as well.
        column, offset, hidden = centre_bias(bias, len(points))
    elif bias is not None:
        points, offset, hidden = augment(points, bias)
    if len(points) == 0:
        return FaissIndex(kind, metric, points, column, offset, hidden, None, None)
    codes = None
    with faiss_structures.one_thread():
        match kind:
            case "flat":
                index = faiss_structures.flat(points)
            case "ivf":
                earlier = getattr(reuse_clusters, "index", None)
                index = faiss_structures.ivf(points, column, earlier)
            case "pq":
                index = faiss_structures.pq(points, column)
            case "hnsw":
                index = faiss_structures.hnsw(points)
            case "lsh":
                index, codes = faiss_structures.lsh(points)
    if kind in ("flat", "hnsw"):
        points = faiss_structures.stored_points(index)  # so that there is only one copy
    if copy and np.may_share_memory(points, keys):
        points = points.copy()  # the caller may write over its own
    return FaissIndex(kind, metric, points, column, offset, hidden, index, codes)


def _padded(rows: RowArray, scores: Floats | None, k: int) -> Candidates:
    """Pad to k with -1; where FAISS says -1 the score is -inf."""
    shape = (len(rows), k)
    all_rows, all_scores = np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32)
    if scores is not None:
        all_rows[:, : rows.shape[1]] = rows
        all_scores[:, : rows.shape[1]] = np.where(rows < 0, np.float32(-np.inf), scores)
    return Candidates(all_rows, all_scores)
