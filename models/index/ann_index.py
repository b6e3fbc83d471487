"""Approximate nearest-neighbour index: the k rows whose keys have the largest score with a query.

The score is the inner product, plus a bias. An index never changes once built: adding to a FAISS
index while it is searched crashes, so a new one is built and swapped in by reference. Parameters of
a search travel with that search, so any number may run at once.

The caller chooses how many threads FAISS uses.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch  # noqa: F401  # before faiss: each carries an OpenMP runtime, and the order is ours
from numpy.typing import NDArray

import faiss  # isort: skip

Floats = NDArray[np.float32]


def normalize_rows(vectors: Floats) -> Floats:
    """Divide each of vectors [n, d] by its length; a zero vector stays zero."""
    wide = vectors.astype(np.float64)  # the square of any float32 fits
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    np.divide(wide, length, out=wide, where=length > 0)
    return wide.astype(np.float32)


_faiss: Any = faiss  # its type stubs leave out fast scan

_SEED = 0  # of k-means: the same points give the same index
_PQ_BITS = 4
_PQ_SAMPLE = 65_536  # points that codebooks are trained on
_BATCH = 65_536  # points added at once
_GROWTH = 1.5  # k-means runs again when √n is this many times the number of clusters to reuse
# With many rows k-means takes minutes, and lists gigabytes. Fewer samples and rounds, and numbers
# of half the precision, cost hardly any recall.
MANY, _POINTS_PER_CLUSTER, _ROUNDS = 200_000, 64, 10


# A structure depends on these beside its points: another value makes another structure.
_PARAMETERS = (
    *(faiss.__version__, _SEED, _PQ_BITS, _PQ_SAMPLE, _BATCH, MANY, _POINTS_PER_CLUSTER, _ROUNDS),
)


class StructureCache(Protocol):
    """Serialised structures by key. Its owner sees to it that a damaged one is not returned."""

    def read(self, key: str) -> NDArray[np.uint8] | None: ...

    def write(self, key: str, data: NDArray[np.uint8]) -> None: ...

    def building(self, key: str) -> AbstractContextManager[None]:
        """Enter before the bytes of a key are made: others who would make them wait, if any can."""
        ...


def cached(
    cache: StructureCache,
    kind: str,
    points: Floats,
    column: Floats | None,
    build: Callable[[], Any],
) -> Any:
    """Return the structure that `build` makes of points and column, from the cache if it is there.

    The key is a digest of all that the structure is made of, so that none is ever stale.
    """
    digest = hashlib.sha256(repr((kind, points.shape, column is None, _PARAMETERS)).encode())
    digest.update(points.data)
    if column is not None:
        digest.update(np.ascontiguousarray(column).data)
    key = f"{kind}-{digest.hexdigest()}"
    data = cache.read(key)
    if data is None:
        with cache.building(key):
            data = cache.read(key)  # another one may just have built it
            if data is None:
                index = build()
                cache.write(key, faiss.serialize_index(index))
                return index
    return faiss.deserialize_index(data)


def ivf(points: Floats, earlier: Any) -> Any:
    """Build an inverted file of points [n, D]: √n clusters; the nearest to a query are scanned.

    The clusters of an earlier inverted file of much the same points are reused.
    """
    n, dim = points.shape
    lists = max(1, min(n, round(math.sqrt(n))))
    inverted = isinstance(earlier, faiss.IndexIVF) and earlier.d == dim
    if inverted and lists <= _GROWTH * earlier.nlist:
        quantizer, lists = faiss.clone_index(earlier.quantizer), earlier.nlist
    else:
        quantizer = faiss.IndexFlatIP(dim)
    many, metric = n > MANY, faiss.METRIC_INNER_PRODUCT
    index: Any
    if many:
        half = faiss.ScalarQuantizer.QT_fp16
        # Not of residuals to a cluster's centre: that would be for distances.
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, lists, half, metric, False)
    else:
        index = faiss.IndexIVFFlat(quantizer, dim, lists, metric)
    index.cp.seed = _SEED
    index.cp.min_points_per_centroid = 1  # FAISS prints a warning below 39
    if many:
        index.cp.max_points_per_centroid, index.cp.niter = _POINTS_PER_CLUSTER, _ROUNDS
    limit = lists * _POINTS_PER_CLUSTER if many else n
    index.train(points[_sampled_rows(n, limit)])  # a trained quantizer keeps its clusters
    # In batches: a copy of all takes gigabytes, and stops the whole process when it is freed.
    for begin in range(0, n, _BATCH):
        index.add(points[begin : begin + _BATCH])
    return index


def pq(points: Floats, column: Floats | None) -> Any:
    """Build codes of four bits for each two dimensions of all points, scanned within registers.

    After André, Kermarrec and Le Scouarnec, "Cache locality is not enough: high-performance nearest
    neighbor search with product quantization fast scan" (VLDB 2015). Its dimensions are even.
    `column` [n] is one more dimension of the points [n, D].
    """
    n, dim = len(points), points.shape[1] + (column is not None)
    parts = -(-dim // 2)
    index = _faiss.IndexPQFastScan(2 * parts, parts, _PQ_BITS, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.seed = _SEED
    index.pq.cp.min_points_per_centroid = 1  # FAISS prints a warning below 39
    sample = _with_column(points, column, _sampled_rows(n, _PQ_SAMPLE))
    # Repeated up to the number of codes: k-means refuses fewer points than clusters.
    index.train(pad_to_even(np.resize(sample, (max(len(sample), 2**_PQ_BITS), dim))))
    for begin in range(0, n, _BATCH):
        index.add(pad_to_even(_with_column(points, column, slice(begin, begin + _BATCH))))
    return index


def pad_to_even(points: Floats) -> Floats:
    """Append a zero to points [n, D] of an odd number of dimensions."""
    odd = points.shape[1] % 2
    padded: Floats = np.pad(points, ((0, 0), (0, 1))) if odd else points
    return np.ascontiguousarray(padded)


@contextmanager
def one_thread() -> Iterator[None]:
    """Build on one thread, which leaves the other cores to requests.

    OpenMP keeps this number for each thread of the process, so only this build is slowed.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _with_column(points: Floats, column: Floats | None, rows: slice | NDArray[np.int64]) -> Floats:
    part = points[rows]
    return part if column is None else np.column_stack([part, column[rows]])


def _sampled_rows(count: int, limit: int) -> slice | NDArray[np.int64]:
    if count <= limit:
        return slice(None)
    return np.sort(np.random.default_rng(_SEED).choice(count, limit, replace=False))


IndexKind = Literal["flat", "ivf", "pq"]
Mask = NDArray[np.bool_]
RowArray = NDArray[np.int64]


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
        """Find the k best rows for each of the queries [Q, d]: [Q, k], best first, then -1.

        Few allowed rows are scanned exactly, and so is everything when k covers it, unless `probes`
        says which lists are scanned.

        Args:
            allow: bool [n], the rows that may be found; None = all.
            probes: search effort: clusters scanned (ivf), codes re-ranked exactly (pq); flat
                ignores it. None = a default that grows as `allow` narrows.
            boost: float32 [n], added to the scores; only of a pq with a bias.
            least: the fewest allowed rows that share a boost, for as much effort as if only these
                were allowed; None = all of them do.

        Raises ValueError for queries that are not finite, or an `allow` of another shape, behind
        which FAISS would read.
        """
        if boost is not None and self.bias_column is None:
            raise ValueError("boost: needs an index of kind 'pq' with a bias")
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
        if count == 0:
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
        wanted = max(k, probes or max(_RERANKED * k, _MIN_RERANKED))
        ranked = min(len(self), math.ceil(wanted * widen))
        _, rows = self.index.search(pad_to_even(queries), ranked)
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
        keys: float32 [n, d]; n may be 0. The index may share them: never write to them.
        bias: float32 [n]. It enters as one more dimension, (k, b)·(q, 1) = q·k + b, so the order
            stays exact. -inf keeps a row out of every answer.
        reuse_clusters: an earlier index of much the same keys, whose clusters (ivf) are reused.
        cache: of indexes that were built before; one of reused clusters is not looked for there.

    Raises ValueError for keys or biases that are not finite.
    """
    points, dim = np.ascontiguousarray(keys, dtype=np.float32), keys.shape[1]
    column = hidden = None
    if bias is not None:
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
            with one_thread():
                if kind == "pq":
                    return pq(points, column)
                return ivf(points, earlier)

        if cache is None or (kind == "ivf" and earlier is not None):
            index = build()
        else:
            index = cached(cache, kind, points, column, build)
    return CoarseIndex(kind, dim, points, column, hidden, index)


def _check_finite(points: Floats) -> None:
    if not all(np.isfinite(points[at : at + _BLOCK]).all() for at in range(0, len(points), _BLOCK)):
        raise ValueError("keys: must be finite")
