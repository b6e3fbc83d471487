"""FAISS structures over points, as `models.index.ann_index` builds them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch  # noqa: F401  # before faiss: each carries an OpenMP runtime, and the order is ours
from numpy.typing import NDArray

from models.index.unit_vectors import Floats

import faiss  # isort: skip

_faiss: Any = faiss  # its type stubs leave out fast scan

_SEED = 0  # of k-means: the same points give the same index
_PQ_BITS = 4
_PQ_SAMPLE = 65_536  # points that codebooks are trained on
_BATCH = 65_536  # points added at once
_GROWTH = 1.5  # k-means runs anew when √n is so many times the number of clusters to reuse
# Of many rows k-means takes minutes, and lists gigabytes: fewer samples and rounds, and numbers of
# half the precision, cost hardly any recall.
MANY, _POINTS_PER_CLUSTER, _ROUNDS = 200_000, 64, 10


# Whatever a structure depends on beside its points: another value makes another structure.
_PARAMETERS = (
    *(faiss.__version__, _SEED, _PQ_BITS, _PQ_SAMPLE, _BATCH, MANY, _POINTS_PER_CLUSTER, _ROUNDS),
)


class StructureCache(Protocol):
    """Serialised structures by key. Its owner sees to it that a damaged one is not returned."""

    def read(self, key: str) -> NDArray[np.uint8] | None:
        """Return the bytes written under a key; None without any."""
        ...

    def write(self, key: str, data: NDArray[np.uint8]) -> None:
        """Keep bytes under a key."""
        ...

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
    """Build an inverted file: √n clusters, of which the nearest to a query are scanned.

    Args:
        points: float32 [n, D], n at least 1.
        earlier: a FAISS index of much the same points, whose clusters are reused if it is an
            inverted file; or None.
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

    Args:
        points: float32 [n, D], n at least 1.
        column: [n], one more dimension of the points; or None.
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
    """Points of some rows, with one more dimension where there is a column."""
    part = points[rows]
    return part if column is None else np.column_stack([part, column[rows]])


def _sampled_rows(count: int, limit: int) -> slice | NDArray[np.int64]:
    """At most `limit` rows to train on, in their order."""
    if count <= limit:
        return slice(None)
    return np.sort(np.random.default_rng(_SEED).choice(count, limit, replace=False))
