"""Compare three ways over a user's memory: every row, a top-k, clusters.

`python -m tests.benchmarks.attention.user_memory` prints the table.
All three are timed in one run on one core, and compared with float64. A top-k needs an index and
clusters need a tree: the time of both is given apart, since a memory of one request pays for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from torch import Tensor

from models.attention.clustered.cluster_tree import ClusterTree, KVTable
from models.attention.clustered.clustered_attention import attend_clusters
from models.attention.kv_memory import KeyValueMemory
from models.attention.partial_softmax import KVBlock, attend_blocks
from models.history.attention_options import DEFAULT_K
from models.index.ann_index import CoarseIndex
from models.index.two_stage import attend_retrieved, index_heads
from tests.benchmarks.attention.kernels import (
    drawn_memory,
    float64_attention,
    heads_first,
    relative_error,
)
from tests.benchmarks.harness import tables
from tests.benchmarks.harness.timing import alternate

_SIZES = (200, 1_000, 10_000, 100_000)
_JUDGED = 16  # targets compared with float64, which takes much memory
_INVERTED_FROM = 4_096  # rows: an inverted file over fewer takes longer than a scan


@dataclass(frozen=True, slots=True)
class Way:
    """One way to attend over a memory of so many rows for so many targets."""

    name: str
    rows: int
    targets: int
    seconds: float  # with the index or the tree at hand
    build: float  # seconds to build it
    error: float  # relative, of the contexts against float64


@torch.inference_mode()
def measure(
    sizes: Sequence[int] = _SIZES, targets: Sequence[int] = (1, 100), rounds: int = 9
) -> Iterator[Way]:
    """Time every way over memories of `sizes` rows, on this thread."""
    for rows in sizes:
        memory, queries = drawn_memory(rows, max(targets))
        _, keys, values, bias = heads_first(queries, memory)
        started = time.process_time()
        indexes = index_heads(memory, "ivf" if rows > _INVERTED_FROM else "flat")
        indexed = time.process_time()
        tree = ClusterTree(KVTable(keys.contiguous(), values.contiguous()), bias[:, 0])
        build = {"top-k": indexed - started, "clusters": time.process_time() - indexed}
        for count in targets:
            query = queries[:count]
            works = {
                "every row": partial(
                    _every_row, _heads_first(query), KVBlock(keys, values, bias[:, 0])
                ),
                "top-k": partial(_top_k, query, memory, indexes),
                "clusters": partial(_clusters, tree, _heads_first(query)),
            }
            timed = alternate(works, rounds)
            truth = float64_attention(query[:_JUDGED], memory).context
            for name, work in works.items():
                error = relative_error(work().transpose(0, 1)[:_JUDGED], truth)
                seconds = timed.seconds(name).median
                yield Way(name, rows, count, seconds, build.get(name, 0.0), error)


def _every_row(query: Tensor, block: KVBlock) -> Tensor:
    return attend_blocks(query, [block]).context


def _heads_first(query: Tensor) -> Tensor:
    return query.transpose(0, 1).contiguous()


def _top_k(query: Tensor, memory: KeyValueMemory, indexes: Sequence[CoarseIndex]) -> Tensor:
    """Contexts [H, T, d_v] of the softmax over the rows that FAISS finds."""
    found = attend_retrieved(query, memory, indexes, min(DEFAULT_K, len(memory)))
    return found.context.transpose(0, 1)


def _clusters(tree: ClusterTree, query: Tensor) -> Tensor:
    """Contexts [H, T, d_v] to the default error."""
    return attend_clusters(tree, query).partial.context


if __name__ == "__main__":
    torch.set_num_threads(1)
    tables.table(
        Console(),
        "A user's memory: time with index or tree at hand, time to build it, error of the contexts",
        ("by", "rows", "targets", "time", "build", "error"),
        (
            (
                way.name,
                f"{way.rows:,}",
                f"{way.targets}",
                tables.seconds(way.seconds),
                tables.seconds(way.build),
                f"{way.error:.2%}",
            )
            for way in measure()
        ),
    )
