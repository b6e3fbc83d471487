"""Attention over memories of any length: every row, lists and a top-k, beside the fused kernel.

All answer the same queries over the same rows. Errors of contexts are relative to their length,
against float64.
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

from models.attention.attend import MAX_ERROR, AttentionOptions
from models.attention.kv_memory import KVTable, gather_rows
from models.attention.partial_softmax import Attended, KVBlock, PartialSoftmax, attend_blocks
from models.history.long_history import LISTS_FROM
from models.index.key_lists import KeyLists
from models.index.memory_attention import Indexes, Memory, attend, index_heads
from tests.benchmarks.harness.timing import ProgressCallback, Spread, alternate, no_progress

MANY_TARGETS = 100
TARGETS = (1, MANY_TARGETS)
_JUDGED = 32  # targets a block of float64 holds
_TOP_K_UP_TO = 100_000  # rows: to build an inverted index of more takes minutes
_PROBES = 16  # of its lists
_ROUNDING = 1e-5  # an error that float32 has in any case


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Rows and queries of one kind: H heads, n rows, T targets."""

    name: str
    keys: Tensor  # [H, n, d]
    values: Tensor  # [H, n, d_v]
    log_weights: Tensor  # [H, n]; of a row that stands for many events, the log of how many
    queries: Tensor  # [H, T, d]
    events: int  # that the rows stand for
    whole: Callable[[], tuple[Tensor, Tensor]] | None = None  # keys and values event by event
    metric: Tensor | None = None  # [H, d, d] mean of qqᵀ over the queries to come

    @property
    def rows(self) -> int:
        """The number of rows n."""
        return self.keys.shape[1]

    @property
    def block(self) -> KVBlock:
        """All rows."""
        return KVBlock(self.keys, self.values, self.log_weights)

    def build_lists(self) -> KeyLists:
        """Put all rows in lists, of a table that lies in memory as the catalogue's does."""
        keys, values = (
            each.transpose(0, 1).contiguous().transpose(0, 1) for each in (self.keys, self.values)
        )
        rows = torch.arange(self.rows)
        return KeyLists(KVTable(keys, values), rows, self.log_weights, metric=self.metric)


@dataclass(frozen=True, slots=True)
class Case:
    """One way over one kind of rows, for one number of targets."""

    name: str
    events: int
    rows: int
    targets: int
    way: str  # every row, lists, or top-k
    fused: Spread  # seconds of the fused kernel over all events
    seconds: Spread
    ratio: Spread  # the fused kernel's seconds over this way's
    build: float  # seconds of the processor until the lists or the index are there
    held: float  # bytes of these for each row
    scanned: float  # rows attended one by one, mean
    mass: float  # share of the softmax that these hold, mean
    stated: tuple[float, float] | None  # median and maximum of the errors that answers state
    error: tuple[float, float, float]  # median, 99th percentile, maximum
    within_asked: float  # share of contexts, of all heads and targets
    within_stated: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@torch.inference_mode()
def measure(
    materials: Iterable[Material],
    rounds: int,
    *,
    count: int,
    targets: Sequence[int] = TARGETS,
    lists_from: int = LISTS_FROM,
    max_error: float = MAX_ERROR,
    progress: ProgressCallback = no_progress,
) -> list[Case]:
    """Measure every material with every number of targets.

    Args:
        materials: one after the other, so that memory holds only one.
        rounds: of each timing.
        count: how many materials there are.
        targets: how many ask at once.
        lists_from: rows from which lists are used.
        max_error: asked for.
        progress: hears how many materials are done.
    """
    found: list[Case] = []
    for number, material in enumerate(materials):
        progress(number, count)
        found += _cases(material, rounds, targets, lists_from, max_error)
    progress(count, count)
    return found


@torch.inference_mode()
def measure_crossover(material: Material, rounds: int) -> list[float]:
    """Return the rows from which lists are faster than every row, for each number of targets.

    The time of lists does not depend on the rows in them, that of every row is proportional to
    these: so they cross at the number of rows times the ratio of both.
    """
    lists = material.build_lists()
    rows = []
    for targets in TARGETS:
        query = material.queries[:, :targets]
        works: dict[str, Callable[[], object]] = {
            "lists": partial(_by_lists, lists, query, math.inf),
            "every row": partial(_gather_and_attend, query, lists, material.log_weights),
        }
        rows.append(material.rows * alternate(works, rounds).ratio("lists", "every row").median)
    return rows


def _cases(
    material: Material,
    rounds: int,
    targets: Sequence[int],
    lists_from: int,
    max_error: float,
) -> Iterator[Case]:
    lists, indexes, build, held = None, None, {}, {}
    if material.rows >= lists_from:
        started = time.process_time()
        lists = material.build_lists()
        build["lists"], held["lists"] = time.process_time() - started, float(lists.nbytes)
        if material.rows <= _TOP_K_UP_TO:
            started = time.process_time()
            indexes = index_heads(material.block, "ivf")
            build["top-k"] = time.process_time() - started
            held["top-k"] = float(sum(index.nbytes for index in indexes))
    keys, values = (material.keys, material.values)
    if material.whole is not None:
        keys, values = material.whole()
    for number in targets:
        asked = replace(material, queries=material.queries[:, :number])
        query, truth = asked.queries, exact_contexts(asked)
        ways: dict[str, Callable[[], Attended]] = {}
        if lists is not None:
            ways["lists"] = partial(_by_lists, lists, query, max_error)
        else:
            ways["every row"] = partial(_by_rows, query, material.block)
        if indexes is not None:
            ways["top-k"] = partial(_by_top_k, query, material.block, indexes)
        fused = partial(scaled_dot_product_attention, query[None], keys[None], values[None])
        timed = alternate({"fused": fused, **ways}, rounds)
        for way, work in ways.items():
            found = work()
            context = found.partial.context.double()
            off = (context - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-30)
            yield Case(
                material.name,
                material.events,
                material.rows,
                number,
                way,
                timed.seconds("fused"),
                timed.seconds(way),
                timed.ratio("fused", way),
                build.get(way, 0.0),
                held.get(way, 0.0) / material.rows,
                float(found.scanned.mean()),
                float(found.mass.mean()),
                None if way == "top-k" else (float(found.error.median()), float(found.error.max())),
                (float(off.median()), float(off.flatten().quantile(0.99)), float(off.max())),
                float((off <= max_error).double().mean()),
                float((off <= found.error + _ROUNDING).double().mean()),
            )


def _by_rows(query: Tensor, block: KVBlock) -> Attended:
    return Attended.exact(attend_blocks(query, [block]), block.keys.shape[1])


def _gather_and_attend(query: Tensor, lists: KeyLists, log_weights: Tensor) -> PartialSoftmax:
    keys, values = (gather_rows(each, lists.rows) for each in lists.table)
    return attend_blocks(query, [KVBlock(keys, values, log_weights)])


def _by_lists(lists: KeyLists, query: Tensor, max_error: float) -> Attended:
    heads, targets, _ = query.shape
    nothing = PartialSoftmax.empty(heads, targets, lists.table.values.shape[2])
    return lists.attend(query, nothing, max_error=max_error)


def _by_top_k(query: Tensor, block: KVBlock, indexes: Indexes) -> Attended:
    """Attend over the rows that FAISS finds; every row gives their mass."""
    options = AttentionOptions(mode="coarse", probes=_PROBES)
    return attend(query, Memory(block, indexes=lambda _kind: indexes), options)


def exact_contexts(material: Material) -> Tensor:
    """Return the contexts [H, T, d_v] by the definition, in float64."""
    heads = []
    for head, query in enumerate(material.queries.double()):
        keys, values, weights = (part[head].double() for part in material.block[:3])
        parts = [
            torch.softmax(part @ keys.T / keys.shape[1] ** 0.5 + weights, -1) @ values
            for part in torch.split(query, _JUDGED)
        ]
        heads.append(torch.cat(parts))
    return torch.stack(heads)
