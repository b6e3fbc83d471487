"""Attention over memories of any length: ours beside the fused kernel, and beside a top-k.

Every figure is of the same queries over the same rows. Errors are against float64: of the scores
that contexts give, in standard deviations of the exact scores over the targets; and of the contexts
themselves, relative to their length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.attention.clustered.cluster_tree import MIN_CLUSTER_SIZE, ClusterTree, KVTable
from models.attention.clustered.clustered_attention import MAX_ERROR, attend_clusters
from models.attention.kv_memory import KeyValueMemory
from models.attention.memory_query import MemoryQuery
from models.attention.partial_softmax import KVBlock, attend_blocks
from models.history.attention_options import CROSSOVER, Crossover
from models.index.ann_index import CoarseIndex
from models.index.two_stage import index_heads
from tests.benchmarks.harness.timing import ProgressCallback, Spread, alternate, no_progress

TOP = 20
_REFERENCE = "scaled_dot_product_attention"
_OURS = "ours"
_TOP_K = (16, 64, 256, 1_024, 4_096)
NAMED_K = (64, 256)
_JUDGED = 32  # targets a block of float64 holds
_FLAT_UP_TO = 4_096  # rows that an index scans sooner than it finds its lists


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Rows and queries of one kind: H heads, n rows, T targets."""

    name: str
    keys: Tensor  # [H, n, d]
    values: Tensor  # [H, n, d_v]
    log_weights: Tensor  # [H, n]; of rows that are many events in one, the log of how many
    queries: Tensor  # [H, T, d]
    outputs: Tensor  # [H, T, d_v]
    events: int  # that the rows stand for: n where each is its own
    whole: Callable[[], tuple[Tensor, Tensor]] | None = None  # keys and values event by event
    metric: Tensor | None = None  # [H, d, d] of the queries to come

    @property
    def spread(self) -> float:
        """The mean standard deviation of the scores over the rows."""
        rows = self.keys[:, :: max(1, self.keys.shape[1] // 10_000)]
        scores = self.queries[:, :50] @ rows.mT / self.keys.shape[2] ** 0.5
        return float(scores.std(-1).mean())

    def asking(self, targets: int) -> Material:
        """The same of the first targets alone."""
        return replace(self, queries=self.queries[:, :targets], outputs=self.outputs[:, :targets])


@dataclass(frozen=True, slots=True)
class Off:
    """Errors of contexts and scores against the exact ones."""

    score_median: float  # of the targets' scores, over the standard deviation of the exact ones
    score_p99: float
    context_median: float  # of heads and targets, relative to the context's length
    context_p99: float
    overlap: float  # of the 20 targets of largest score

    @classmethod
    def of(cls, contexts: Tensor, exact: Tensor, outputs: Tensor) -> Off:
        """Compare contexts [H, T, d_v] with float64."""
        scores, wanted = ((x.double() * outputs).sum((0, 2)) for x in (contexts, exact))
        off = (scores - wanted).abs() / wanted.std().clamp(min=1e-30) if len(wanted) > 1 else None
        away = (contexts.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
        count = min(TOP, len(wanted))
        best, found = (set(x.topk(count).indices.tolist()) for x in (wanted, scores))
        nothing = math.nan
        return cls(
            nothing if off is None else float(off.median()),
            nothing if off is None else float(off.quantile(0.99)),
            float(away.median()),
            float(away.flatten().quantile(0.99)),
            len(best & found) / count,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of rows, one length, one number of targets."""

    name: str
    events: int
    rows: int
    targets: int
    spread: float  # of the scores
    path: str  # every row, or cells
    build: float  # seconds until the cells were there; 0 without
    held: float  # bytes that they hold, for each row
    reference: Spread  # seconds of the fused kernel over all events
    ours: Spread  # seconds
    faster: Spread  # the reference's over ours
    off: Off
    stated: float  # median of the errors stated, contexts
    scanned: float  # rows attended one by one, mean
    kept: int  # of heads and targets, contexts within the error asked for
    pairs: int  # of heads and targets
    top_k: dict[int, Off]
    top_k_seconds: dict[int, float]
    equal: int | None  # the largest k that takes no more time than ours; None = not one of them

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@torch.inference_mode()
def measure(
    materials: Iterable[Material],
    targets: Sequence[int],
    rounds: int,
    *,
    count: int,
    crossover: Crossover = CROSSOVER,
    max_error: float = MAX_ERROR,
    top_k_up_to: int,
    progress: ProgressCallback = no_progress,
) -> list[Case]:
    """Measure every material with every number of targets.

    Args:
        materials: one after the other, so that only one is held.
        targets: how many ask at once, rising.
        rounds: of each timing.
        count: how many materials there are.
        crossover: from where on cells are used.
        max_error: asked for.
        top_k_up_to: events up to which a top-k is measured beside.
        progress: hears how many materials are done.
    """
    found: list[Case] = []
    for number, material in enumerate(materials):
        progress(number, count)
        top_k = material.events <= top_k_up_to
        found += _cases(material, targets, rounds, crossover, max_error, top_k=top_k)
    progress(count, count)
    return found


def _cases(
    material: Material,
    targets: Sequence[int],
    rounds: int,
    crossover: Crossover,
    max_error: float,
    *,
    top_k: bool,
) -> Iterator[Case]:
    rows = material.keys.shape[1]
    cells, build = None, 0.0
    if rows >= max(MIN_CLUSTER_SIZE, crossover.rows(max(targets))):
        started = time.process_time()
        table = KVTable(material.keys, material.values)
        cells = ClusterTree(table, material.log_weights, metric=material.metric)
        build = time.process_time() - started
    indexes: tuple[CoarseIndex, ...] | None = None
    memory = KeyValueMemory(
        material.keys.transpose(0, 1), material.values.transpose(0, 1), bias=material.log_weights
    )
    if top_k:
        indexes = index_heads(memory, "ivf" if rows > _FLAT_UP_TO else "flat")
    keys, values = (material.keys, material.values)
    if material.whole is not None:
        keys, values = material.whole()
    for number in targets:
        asked = material.asking(number)
        used = cells if cells is not None and rows >= crossover.rows(number) else None
        yield _case(asked, used, build, (keys, values), rounds, max_error, memory, indexes)


def _case(
    material: Material,
    cells: ClusterTree | None,
    build: float,
    whole: tuple[Tensor, Tensor],
    rounds: int,
    max_error: float,
    memory: KeyValueMemory,
    indexes: tuple[CoarseIndex, ...] | None,
) -> Case:
    query, rows = material.queries, material.keys.shape[1]
    every = KVBlock(material.keys, material.values, material.log_weights)

    def reference() -> Tensor:
        return scaled_dot_product_attention(query[None], whole[0][None], whole[1][None])[0]

    def ours() -> Tensor:
        if cells is None:
            return attend_blocks(query, [every]).context
        return attend_clusters(cells, query, max_error=max_error).partial.context

    timed = alternate({_REFERENCE: reference, _OURS: ours}, rounds)
    exact = _exact(material)
    contexts = ours()
    stated = scanned = 0.0
    if cells is not None:
        tail = attend_clusters(cells, query, max_error=max_error)
        stated, scanned = float(tail.error.median()), float(tail.scanned.mean())
    away = (contexts.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
    seconds = timed.seconds(_OURS)
    beside: dict[int, Off] = {}
    took: dict[int, float] = {}
    if indexes is not None:
        lookup = MemoryQuery(query.transpose(0, 1), memory)
        for k in _TOP_K:
            if k >= rows:
                break
            top = partial(_top, lookup, indexes, k)
            beside[k] = Off.of(top(), exact, material.outputs)
            took[k] = alternate({"top": top}, max(3, rounds // 3)).seconds("top").median
            if took[k] > seconds.median and k >= max(NAMED_K):
                break
    equal = max((k for k in beside if took[k] <= seconds.median), default=None)
    return Case(
        material.name,
        material.events,
        rows,
        query.shape[1],
        material.spread,
        "every row" if cells is None else "cells",
        0.0 if cells is None else build,
        0.0 if cells is None else cells.nbytes / rows,
        timed.seconds(_REFERENCE),
        seconds,
        timed.ratio(_REFERENCE, _OURS),
        Off.of(contexts, exact, material.outputs),
        stated,
        scanned if cells is not None else float(rows),
        int((away <= max_error).sum()),
        away.numel(),
        beside,
        took,
        equal,
    )


def _top(lookup: MemoryQuery, indexes: tuple[CoarseIndex, ...], k: int) -> Tensor:
    """Contexts [H, T, d_v] of a softmax over the k nearest rows alone."""
    asked = lookup.query.contiguous().numpy()
    rows = [
        torch.from_numpy(index.search(asked[:, head].copy(), k))
        for head, index in enumerate(indexes)
    ]
    return lookup.attend_rows(torch.stack(rows, 1)).context.transpose(0, 1)


def _exact(material: Material) -> Tensor:
    """Contexts [H, T, d_v] in float64."""
    heads = []
    for keys, values, weights, query in zip(
        material.keys.double(),
        material.values.double(),
        material.log_weights.double(),
        material.queries.double(),
        strict=True,
    ):
        parts = [
            torch.softmax(part @ keys.T / keys.shape[1] ** 0.5 + weights, -1) @ values
            for part in torch.split(query, _JUDGED)
        ]
        heads.append(torch.cat(parts))
    return torch.stack(heads)
