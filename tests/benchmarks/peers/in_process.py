"""Heed's coarse index beside qdrant-edge in one process, in the environment of peers.

    python -m tests.benchmarks.peers.in_process '{"keys": …, "queries": …, "rounds": 7}'

Answers one line of JSON on stdout; a line for each step goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import qdrant_edge as edge
from numpy.typing import NDArray

from models.index import ann_index
from tests.benchmarks.harness.timing import alternate, ratios, spread
from tests.benchmarks.peers.effort import GOAL, LADDER, least
from tests.benchmarks.peers.quality import Nearest

TOP = 10
HEED = "Heed's coarse index"
Look = Callable[[int, int], Sequence[int]]  # query, effort -> rows


@dataclass(frozen=True, slots=True)
class Subject:
    """An index, and how it is asked."""

    name: str
    look: Look
    ladder: Sequence[int]
    effort: str  # what the effort is called
    settings: str
    build: float  # seconds


def main(spec: Mapping[str, Any]) -> None:
    """Build each, choose each one's effort on half of the queries, time them on the others."""
    keys, queries = np.load(spec["keys"]), np.load(spec["queries"])
    half = len(queries) // 2
    nearest = Nearest(keys, queries, TOP)
    with tempfile.TemporaryDirectory() as folder:
        subjects = [_heed(keys, queries), *_edges(keys, queries, Path(folder))]
        chosen = {}
        for each in subjects:
            chosen[each.name] = least(
                lambda effort, each=each: [each.look(at, effort) for at in range(half)],  # type: ignore[misc]
                lambda found: nearest.recall(found, range(half)),
                goal=spec["goal"],
                ladder=each.ladder,
            )
            _say(f"{each.name}: {each.effort} {chosen[each.name].effort}")
        others = range(half, len(queries))
        works = {}
        for each in subjects:
            effort = chosen[each.name].effort
            works[each.name] = lambda look=each.look, effort=effort: [
                look(at, effort) for at in others
            ]
        timed = alternate(works, spec["rounds"])
        found = {}
        for each in subjects:
            effort = chosen[each.name].effort
            answers = [each.look(at, effort) for at in others]
            seconds = [sample / len(others) for sample in timed.samples[each.name]]
            found[each.name] = {
                "settings": each.settings,
                "effort": f"{each.effort} {effort}",
                "recall": nearest.recall(answers, others),
                "build_seconds": each.build,
                "seconds": spread(seconds).as_dict(),
                "heed_times_as_fast": ratios(
                    timed.samples[each.name], timed.samples[HEED]
                ).as_dict(),
            }
    os.write(spec["answer"], (json.dumps(found) + "\n").encode())


def _heed(keys: NDArray[np.float32], queries: NDArray[np.float32]) -> Subject:
    """The index that a search asks, built as the service builds it."""
    started = time.perf_counter()
    index = ann_index.build_index("ivf", keys)
    took = time.perf_counter() - started
    rows = [np.ascontiguousarray(query[None]) for query in queries]
    lists = index.index.nlist if index.index is not None else 1
    ladder = sorted({min(lists, effort) for effort in (1, 2, 4, 6, 8, *LADDER)})
    settings = f"IVF, {lists} clusters, faiss, one thread"
    return Subject(
        HEED,
        lambda at, effort: index.search(rows[at], TOP, probes=effort)[0].tolist(),
        ladder,
        "probes",
        settings,
        took,
    )


def _edges(
    keys: NDArray[np.float32], queries: NDArray[np.float32], folder: Path
) -> Iterator[Subject]:
    """As it comes, with a denser graph, and with vectors in eight bits that are ranked anew."""
    requests = _Requests(queries)
    eight = edge.ScalarQuantizationConfig(edge.ScalarType.Int8, always_ram=True)
    for name, links, construction, quantization in (
        ("qdrant-edge", 16, 100, None),
        ("qdrant-edge, denser", 32, 200, None),
        ("qdrant-edge, int8", 32, 200, eight),
    ):
        started = time.perf_counter()
        shard = _shard(keys, folder / name, links, construction, quantization)
        took = time.perf_counter() - started
        _say(f"{name}: built in {took:.0f} s")
        stated = f"HNSW, m {links}, ef_construct {construction}, one segment, one thread"
        if quantization is not None:
            stated += ", scalar int8 in memory, rescored, oversampling 2"

        look = partial(requests.look, shard, quantization is not None)
        yield Subject(name, look, LADDER, "hnsw_ef", stated, took)


class _Requests:
    """Requests of qdrant-edge, each made once, so that no time goes into it."""

    def __init__(self, queries: NDArray[np.float32]) -> None:
        self._queries = queries.tolist()
        self._made: dict[tuple[bool, int, int], Any] = {}

    def look(self, shard: Any, quantized: bool, at: int, effort: int) -> Sequence[int]:
        """The rows that a shard finds of a query."""
        key = (quantized, at, effort)
        if key not in self._made:
            again = edge.QuantizationSearchParams(rescore=True, oversampling=2.0)
            params = edge.SearchParams(hnsw_ef=effort, quantization=again if quantized else None)
            nearest = edge.Query.Nearest(self._queries[at])
            self._made[key] = edge.QueryRequest(TOP, query=nearest, params=params)
        return [point.id for point in shard.query(self._made[key])]


def _shard(
    keys: NDArray[np.float32], folder: Path, links: int, construction: int, quantization: Any
) -> Any:
    folder.mkdir()
    graph = edge.HnswIndexConfig(
        m=links, ef_construct=construction, full_scan_threshold=10, max_indexing_threads=1
    )
    config = edge.EdgeConfig(
        vectors=edge.EdgeVectorParams(
            size=keys.shape[1], distance=edge.Distance.Cosine, quantization_config=quantization
        ),
        hnsw_config=graph,
        optimizers=edge.EdgeOptimizersConfig(indexing_threshold=100, default_segment_number=1),
        max_search_threads=1,
    )
    shard = edge.EdgeShard.create(str(folder), config)
    for at in range(0, len(keys), 1_000):
        part = keys[at : at + 1_000].tolist()
        points = [edge.Point(at + row, vector) for row, vector in enumerate(part)]
        shard.update(edge.UpdateOperation.upsert_points(points))
    shard.optimize()
    return shard


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    main({"goal": GOAL, "rounds": 7, "answer": answer} | json.loads(sys.argv[1]))
