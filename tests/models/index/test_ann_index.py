"""Every kind of index, compared with brute force in float64."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.index import ann_index
from models.index.ann_index import CoarseIndex, Floats, IndexKind, Mask, RowArray, build_index
from tests.support.reference import recall

import faiss  # isort: skip  # after torch, which models.index.ann_index imports first

KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
quick = settings(max_examples=40, deadline=None, derandomize=True)


def written(index: CoarseIndex) -> bytes:
    """FAISS's own structures, and the points beside them."""
    parts = [index.points.tobytes()]
    if index.index is not None:
        parts.append(faiss.serialize_index(index.index).tobytes())
    return b"".join(parts)


def true_scores(queries: Floats, keys: Floats, bias: Floats | None = None) -> np.ndarray[Any, Any]:
    """All scores [Q, n] in float64."""
    scores: np.ndarray[Any, Any] = queries.astype(np.float64) @ keys.astype(np.float64).T
    return scores + (0 if bias is None else bias)


def best(scores: np.ndarray[Any, Any], k: int, allow: Mask | None = None) -> RowArray:
    """The k best rows of each query; -1 where there are fewer."""
    scores = scores if allow is None else np.where(allow, scores, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    rows = np.where(np.take_along_axis(scores, order, 1) == -np.inf, -1, order)
    return np.pad(rows, ((0, 0), (0, max(0, k - rows.shape[1]))), constant_values=-1)


def gaussian(n: int, d: int = 8, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


@dataclass
class Case:
    """One drawn index and search."""

    n: int
    k: int
    biased: bool
    masked: bool
    seed: int


cases = st.builds(
    Case,
    n=st.integers(0, 40),
    k=st.integers(1, 50),
    biased=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(case=cases)
def test_candidates_keep_the_contract(kind: IndexKind, case: Case) -> None:
    """Distinct allowed rows, best first, padded; all when k covers them."""
    n, k, seed = case.n, case.k, case.seed
    rng = np.random.default_rng(seed)
    keys, queries = gaussian(n, 4, seed), gaussian(3, 4, seed + 1)
    keys[rng.random(n) < 0.1] = 0
    bias = (3 * rng.standard_normal(n) - 20).astype(np.float32) if case.biased else None
    if bias is not None:
        bias[rng.random(n) < 0.2] = -np.inf
    allow = rng.random(n) < 0.6 if case.masked else None
    found = build_index(kind, keys, bias=bias).search(queries, k, allow=allow)

    may = np.ones(n, bool) if allow is None else allow.copy()
    if bias is not None:
        may &= bias > -np.inf
    scores = true_scores(queries, keys, bias)
    assert found.shape == (3, k)
    assert found.dtype == np.int64
    for t in range(3):
        real = found[t][found[t] >= 0]
        assert len(set(real)) == len(real)
        assert may[real].all()
        assert (found[t, len(real) :] == -1).all()
        assert (np.diff(scores[t, real]) <= 1e-4).all()
        if kind == "flat" or k >= may.sum() or case.masked:
            wanted = best(scores[t : t + 1], k, may)[0]
            wanted = scores[t, wanted[wanted >= 0]]
            np.testing.assert_allclose(scores[t, real], wanted, atol=1e-4)


def test_large_index_stores_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large index orders by half precision and keeps nearly the same recall."""
    keys, queries = gaussian(4_000, 16), gaussian(20, 16, seed=1)
    bias = np.random.default_rng(3).standard_normal(4_000).astype(np.float32)
    plain = build_index("ivf", keys, bias=bias)
    monkeypatch.setattr(ann_index, "MANY", 1_000)
    index = build_index("ivf", keys, bias=bias)
    scores = true_scores(queries, keys, bias=bias)
    found = index.search(queries, 50)
    assert (np.diff(np.take_along_axis(scores, found, 1)) <= 2e-2).all()
    assert recall(found, plain.search(queries, 50)) > 0.8
    everything = index.search(queries, 50, probes=4_000)
    assert recall(everything, best(scores, 50)) > 0.99
    assert len(written(index)) < len(written(plain))


def test_reindexing_reuses_clusters() -> None:
    """A new index reuses the clusters of an earlier one unless it has many more keys."""
    keys, queries = gaussian(3_000), gaussian(20, seed=1)
    first = build_index("ivf", keys)
    more = np.concatenate([keys[::-1], gaussian(1_000, seed=5)])
    again = build_index("ivf", more, reuse_clusters=first)
    assert isinstance(first.index, faiss.IndexIVF)
    assert isinstance(again.index, faiss.IndexIVF)
    assert again.index.nlist == first.index.nlist
    for cluster in range(first.index.nlist):
        np.testing.assert_array_equal(
            again.index.quantizer.reconstruct(cluster), first.index.quantizer.reconstruct(cluster)
        )
    found = again.search(queries, 10)
    assert recall(found, best(true_scores(queries, more), 10)) > 0.8
    outgrown = build_index("ivf", gaussian(9_000), reuse_clusters=first)
    assert isinstance(outgrown.index, faiss.IndexIVF)
    assert outgrown.index.nlist > first.index.nlist
    for other in (build_index("flat", keys), build_index("ivf", gaussian(3_000, 9))):  # of no use
        np.testing.assert_array_equal(
            build_index("ivf", keys, reuse_clusters=other).search(queries, 10),
            first.search(queries, 10),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_filter_is_exact(kind: IndexKind) -> None:
    """One row in a hundred allowed: lists would starve, so the allowed rows are scanned."""
    keys, queries = gaussian(5000), gaussian(10, seed=1)
    allow = np.zeros(5000, bool)
    allow[::100] = True
    found = build_index(kind, keys).search(queries, 10, allow=allow)
    assert np.array_equal(found, best(true_scores(queries, keys), 10, allow))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_filter_is_honoured(kind: IndexKind) -> None:
    """A wide filter returns allowed rows alone, with recall above 0.8."""
    keys, queries = gaussian(6000), gaussian(20, seed=1)
    keys[-1] *= 10  # would be the best of many, and is not allowed
    allow = np.random.default_rng(2).random(6000) < 0.5
    allow[-1] = False
    index = build_index(kind, keys)
    found = index.search(queries, 10, allow=allow)
    assert allow[found].all()
    wanted = best(true_scores(queries, keys), 10, allow)
    assert recall(found, wanted) > 0.8
    assert recall(index.search(queries, 10, allow=allow, probes=6000), wanted) > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_recall_of_few_rows_is_reported(
    kind: IndexKind, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Recall@32 over keys with row biases: 1 for flat, a fair share for the others."""
    rng = np.random.default_rng(0)
    keys, queries = gaussian(8000, 16), gaussian(30, 16, seed=1)
    bias = -np.log1p(np.arange(8000)[::-1] / 10).astype(np.float32)
    bias = (bias + rng.normal(0, 0.1, 8000)).astype(np.float32)
    index = build_index(kind, keys, bias=bias)
    wanted = best(true_scores(queries, keys, bias), 32)
    found = recall(index.search(queries, 32), wanted)
    record_testsuite_property(f"recall@32 {kind}", round(found, 3))
    assert found == 1 if kind == "flat" else found > 0.7
    harder = recall(index.search(queries, 32, probes=8000), wanted)
    assert harder >= found
    assert harder > 0.95


def test_keys_are_shared() -> None:
    """No index copies its keys, which may take gigabytes; the bias of `pq` is held apart."""
    keys = gaussian(3_000)
    assert all(build_index(kind, keys).points is keys for kind in KINDS)
    assert build_index("pq", keys, bias=np.ones(3_000, np.float32)).points is keys


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_keys_give_the_same_index(kind: IndexKind) -> None:
    """Byte for byte, on one thread or on two."""
    keys = gaussian(1500)
    before = faiss.omp_get_max_threads()
    try:
        built = []
        for threads in (1, 2, 2):
            faiss.omp_set_num_threads(threads)
            built.append(written(build_index(kind, keys)))
            assert faiss.omp_get_max_threads() == threads
    finally:
        faiss.omp_set_num_threads(before)
    assert built[0] == built[1] == built[2]


@pytest.mark.parametrize("kind", KINDS)
def test_searches_at_once_do_not_disturb_each_other(kind: IndexKind) -> None:
    """Concurrent searches with different filters and probes each give their own results."""
    index = build_index(kind, gaussian(4000), bias=gaussian(4000, 1, 3)[:, 0])
    rng = np.random.default_rng(0)
    jobs: list[dict[str, Any]] = [
        {
            "queries": gaussian(int(rng.integers(1, 6)), seed=i),
            "k": int(rng.integers(1, 40)),
            "probes": [None, 1, 5, 200][i % 4],
            "allow": rng.random(4000) < 0.7 if i % 3 else None,
        }
        for i in range(40)
    ]
    alone = [index.search(**job) for job in jobs]
    before = written(index)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            together = pool.map(lambda job: index.search(**job), jobs)
            for a, b in zip(alone, together, strict=True):
                assert np.array_equal(a, b)
    assert written(index) == before


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_few_rows_train_ivf_in_silence(n: int, capfd: pytest.CaptureFixture[str]) -> None:
    """An index over too few rows to train gives no error and prints no warning."""
    index = build_index("ivf", gaussian(n))
    found = index.search(gaussian(2, seed=1), 3)
    assert (found >= 0).sum(1).tolist() == [min(3, n)] * 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": np.full((3, 2), np.nan, np.float32)}, "keys: must be finite"),
        ({"bias": np.array([0, np.inf, 0], np.float32)}, "bias: must be finite or -inf"),
    ],
)
def test_numbers_that_are_not_finite_are_not_indexed(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"kind": "flat", "keys": np.ones((3, 2), np.float32)}
    with pytest.raises(ValueError, match=message):
        build_index(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": np.full((1, 2), np.inf, np.float32)}, "queries: must be finite"),
        ({"allow": np.ones(4, bool)}, r"allow: must be bool \[3\], got bool \[4\]"),
        ({"allow": np.ones(3)}, "allow: must be bool"),
    ],
)
def test_invalid_search_arguments_are_named(change: dict[str, Any], message: str) -> None:
    index = build_index("flat", np.ones((3, 2), np.float32))
    arguments: dict[str, Any] = {"queries": np.ones((1, 2), np.float32), "k": 1}
    with pytest.raises(ValueError, match=message):
        index.search(**(arguments | change))
