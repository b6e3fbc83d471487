"""FAISS's structures over points, as `models.index.ann_index` builds them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch  # noqa: F401  # before faiss: each carries an OpenMP runtime, and the order is ours
from numpy.typing import NDArray

from models.index.mips import Floats, equal_norms

import faiss  # isort: skip

_faiss: Any = faiss  # what its type stubs leave out

_LSH_BITS = 256
_PQ_BITS = 4
_SEEN = 65_536  # points that codes are made after
_PART = 65_536  # points that are added at once
_OUTGROWN = 1.5  # times as many clusters as there are would be right, from which new ones are found
# Of many rows k-means takes minutes, and lists gigabytes: fewer samples and rounds, and numbers of
# half the precision, cost hardly any recall.
MANY, _POINTS, _ROUNDS = 200_000, 64, 10


def flat(points: Floats) -> Any:
    """All points [n, D], each compared."""
    index = faiss.IndexFlatIP(points.shape[1])
    index.add(points)
    return index


def ivf(points: Floats, beside: Floats | None, seed: int, lists: int | None, like: Any) -> Any:
    """Clusters, of which the nearest to a query are scanned.

    Args:
        points: float32 [n, D], n at least 1.
        beside: [n], one more dimension of the points; or None.
        seed: of k-means.
        lists: how many clusters; None = √n.
        like: an earlier one of much the same points, whose clusters are taken over; or None.
    """

    def at(rows: slice | NDArray[np.int64]) -> Floats:
        part = points[rows]
        return part if beside is None else np.column_stack([part, beside[rows]])

    n, dim = len(points), points.shape[1] + (beside is not None)
    lists = max(1, min(n, lists or round(math.sqrt(n))))
    if like is not None and like.d == dim and lists <= _OUTGROWN * like.nlist:
        quantizer, lists = faiss.clone_index(like.quantizer), like.nlist
    else:
        quantizer = faiss.IndexFlatIP(dim)
    many, metric = n > MANY, faiss.METRIC_INNER_PRODUCT
    index: Any
    if many:
        half = faiss.ScalarQuantizer.QT_fp16
        # Not of what is left when a cluster's middle is taken out: that would be for distances.
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, lists, half, metric, False)
    else:
        index = faiss.IndexIVFFlat(quantizer, dim, lists, metric)
    index.cp.seed = seed
    index.cp.min_points_per_centroid = 1  # FAISS prints a warning below 39
    if many:
        index.cp.max_points_per_centroid, index.cp.niter = _POINTS, _ROUNDS
    drawn: slice | NDArray[np.int64] = slice(None)
    if n > lists * _POINTS and many:
        chosen = np.random.default_rng(seed).choice(n, lists * _POINTS, replace=False)
        drawn = np.sort(chosen)
    index.train(at(drawn))  # of a quantizer that is trained it takes the clusters
    # Part by part: a copy of all takes gigabytes, and stops the whole process when it is let go of.
    for begin in range(0, n, _PART):
        index.add(at(slice(begin, begin + _PART)))
    return index


def pq(points: Floats, beside: Floats | None, seed: int) -> Any:
    """Codes of four bits for each two dimensions, of all points: scanned whole, within registers.

    After André, Kermarrec and Le Scouarnec, "Cache locality is not enough: high-performance nearest
    neighbor search with product quantization fast scan" (VLDB 2015). Its dimensions are even.

    Args:
        points: float32 [n, D], n at least 1.
        beside: [n], one more dimension of the points; or None.
        seed: of k-means, and of the points that it sees.
    """
    n, dim = len(points), points.shape[1] + (beside is not None)

    def at(rows: slice | NDArray[np.int64]) -> Floats:
        part = points[rows] if beside is None else np.column_stack([points[rows], beside[rows]])
        return pad_to_even(part)

    parts = -(-dim // 2)
    index = _faiss.IndexPQFastScan(2 * parts, parts, _PQ_BITS, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.seed = seed
    index.pq.cp.min_points_per_centroid = 1  # FAISS prints a warning below 39
    drawn = np.resize(np.arange(n), max(n, 2**_PQ_BITS))  # of fewer there are no clusters
    if n > _SEEN:
        drawn = np.sort(np.random.default_rng(seed).choice(n, _SEEN, replace=False))
    index.train(at(drawn))
    for begin in range(0, n, _PART):
        index.add(at(slice(begin, begin + _PART)))
    return index


def pad_to_even(points: Floats) -> Floats:
    """Points [n, D] with one more dimension of zeros where they have an odd number of them."""
    odd = points.shape[1] % 2
    padded: Floats = np.pad(points, ((0, 0), (0, 1))) if odd else points
    return np.ascontiguousarray(padded)


def hnsw(points: Floats, seed: int, links: int, construction: int) -> Any:
    """A graph over points [n, D], walked from the query's neighbourhood to its nearest."""
    # Over inner products themselves: over distances of points raised to equal norms, recall on
    # keys of unequal norm was .23 where this had .95.
    index = _faiss.IndexHNSWFlat(points.shape[1], links, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = construction
    index.hnsw.rng = _faiss.RandomGenerator(seed)
    index.add(points)
    return index


def lsh(points: Floats, seed: int) -> tuple[Any, Any]:
    """What turns points [n, D] into signs of random projections, and those of the points."""
    index = faiss.IndexLSH(points.shape[1] + 1, _LSH_BITS, True, False)
    index.rrot.init(seed)
    codes = faiss.IndexBinaryFlat(_LSH_BITS)  # IndexLSH itself cannot search a selection of rows
    codes.add(index.sa_encode(equal_norms(points)))
    return index, codes
