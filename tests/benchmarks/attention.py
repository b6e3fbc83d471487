"""Attention over memories of a thousand to a million events, beside torch's fused kernel.

The keys are those of a trained model: items that its longest users took, as often as they did, so
that events on one item are one row; and mixed so that no two rows are alike. All ways answer the
same queries. Errors of contexts are relative to their length, against float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.attention.attend import DEFAULT_K, MAX_ERROR, AttentionOptions, KVTable
from models.attention.partial_softmax import Attended, KVBlock, PartialSoftmax, attend_blocks
from models.catalogue.snapshot import Snapshot
from models.history.long_history import LISTS_FROM
from models.index.key_lists import KeyLists
from models.index.memory_attention import Indexes, Memory, attend, index_heads
from service.domain.errors import Invalid
from tests.benchmarks.harness.data import prepare_data
from tests.benchmarks.harness.jobs import load_data
from tests.benchmarks.harness.options import Rounds
from tests.benchmarks.harness.tables import print_machine, ratio, seconds, table
from tests.benchmarks.harness.timing import Spread, alternate

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
TARGETS = (1, 100)
_JUDGED = 32  # targets a block of float64 holds
_TOP_K_UP_TO = 100_000  # rows: to build an inverted index of more takes minutes
_PROBES = 16  # of its lists
_MIXED = 0.3  # of the second of two items at most, if a row is made of both


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Rows and queries of one kind: H heads, n rows, T targets."""

    name: str
    keys: Tensor  # [H, n, d]
    values: Tensor  # [H, n, d_v]
    log_weights: Tensor  # [H, n]; of a row that stands for many events, the log of how many
    queries: Tensor  # [H, T, d]
    metric: Tensor  # [H, d, d] mean of qqᵀ over the queries to come
    events: tuple[Tensor, Tensor]  # keys and values event by event

    @property
    def block(self) -> KVBlock:
        """All rows."""
        return KVBlock(self.keys, self.values, self.log_weights)

    def build_lists(self) -> KeyLists:
        """Put all rows in lists, of a table that lies in memory as the catalogue's does."""
        keys, values = (
            each.transpose(0, 1).contiguous().transpose(0, 1) for each in (self.keys, self.values)
        )
        rows = torch.arange(self.keys.shape[1])
        return KeyLists(KVTable(keys, values), rows, self.log_weights, metric=self.metric)


class Case(NamedTuple):
    """One way over one kind of rows, for one number of targets."""

    name: str
    events: int
    rows: int
    targets: int
    way: str  # every row, lists, or top-k
    fused: Spread  # seconds of the fused kernel over all events
    seconds: Spread
    times_as_fast: Spread
    build: float  # seconds of the processor until the lists or the index are there
    mass: float  # mean share of the softmax that the rows attended one by one hold
    error: tuple[float, float]  # median and largest
    within: float  # share of contexts that are off by no more than MAX_ERROR


def attention(
    data: Annotated[Path, typer.Option("--data", help="With a trained model.")],
    most: Annotated[int, typer.Option(min=1_000, help="Events of the longest memory.")] = 1_000_000,
    rounds: Rounds = 5,
) -> None:
    """Measure attention over memories of a thousand to a million events.

    A million events take a few minutes on one core and 3 GB of memory.
    """
    print_machine("one thread")
    with prepare_data(data) as ground:
        loaded = load_data(ground.data, ground.longest)
    snapshot = loaded.snapshot
    if snapshot.trained is None:
        raise Invalid("", f"{data} has no model: heed train --data {data} makes one")
    joined = np.concatenate([user.history.rows for user in loaded.users.values()])
    taken = joined[joined >= 0].astype(np.int64)
    taken = taken[snapshot.has_vector[taken]]
    cases: list[Case] = []
    for make in (repeated, distinct):
        for n in LENGTHS:
            if n <= most:
                cases += _measure(make(snapshot, taken, n), rounds)
    table(
        "Attention over n events, beside torch's fused kernel over every event",
        ("keys", "way", "events", "rows", "targets", "fused", "time", "times as fast", "build",
         "mass", "error, median", "largest", f"within {MAX_ERROR:.0%}"),
        (
            (
                each.name,
                each.way,
                f"{each.events:,}",
                f"{each.rows:,}",
                f"{each.targets}",
                seconds(each.fused.median),
                seconds(each.seconds.median),
                ratio(each.times_as_fast),
                seconds(each.build) if each.build else "",
                f"{each.mass:.3f}",
                *(f"{100 * error:.2g} %" for error in each.error),
                f"{each.within:.2%}",
            )
            for each in cases
        ),
        left=2,
        caption=f"A top-k is a softmax over the {DEFAULT_K} rows of largest score that FAISS "
        "finds, with their mass, for which every row is attended too.",
    )  # fmt: skip


def repeated(snapshot: Snapshot, taken: NDArray[np.int64], n: int) -> Material:
    """N events on the items that users took, as often as they did: rows of many in one."""
    events = taken[:n] if n <= len(taken) else np.random.default_rng(n).choice(taken, n)
    items, counts = np.unique(events, return_counts=True)
    tables, chosen, each = snapshot.tables, torch.from_numpy(items), torch.from_numpy(events)
    log_weights = torch.from_numpy(np.log(counts)).float().expand(len(tables.keys), -1)
    return Material(
        "as taken",
        tables.keys[:, chosen].detach(),
        tables.values[:, chosen].detach(),
        log_weights.contiguous(),
        *_queries(snapshot),
        (tables.keys[:, each].detach(), tables.values[:, each].detach()),
    )


def distinct(snapshot: Snapshot, taken: NDArray[np.int64], n: int) -> Material:
    """N rows of which no two are alike: items that users took, each with some of another."""
    generator = torch.Generator().manual_seed(n)
    items = torch.from_numpy(np.unique(taken))
    one = torch.randint(len(items), (n,), generator=generator)
    other = one + torch.randint(1, max(2, len(items)), (n,), generator=generator)
    first, second = items[one], items[other % len(items)]
    share = _MIXED * torch.rand(n, 1, generator=generator)
    keys, values = (
        torch.lerp(part[:, first], part[:, second], share).detach()
        for part in (snapshot.tables.keys, snapshot.tables.values)
    )
    return Material(
        "distinct", keys, values, torch.zeros(keys.shape[:2]), *_queries(snapshot), (keys, values)
    )


def _queries(snapshot: Snapshot) -> tuple[Tensor, Tensor]:
    """Queries of targets [H, T, d], and the mean of qqᵀ over the catalogue."""
    count, items = max(TARGETS), np.flatnonzero(snapshot.has_vector)
    drawn = np.random.default_rng(count).choice(items, count, replace=count > len(items))
    every = snapshot.tables.queries[:, torch.from_numpy(items)].detach()
    queries = snapshot.tables.queries[:, torch.from_numpy(drawn)].detach()
    return queries, every.mT @ every / every.shape[1]


@torch.inference_mode()
def _measure(material: Material, rounds: int) -> list[Case]:
    lists, indexes = None, None
    build = {}
    count = material.keys.shape[1]
    if count >= LISTS_FROM:
        started = time.process_time()
        lists = material.build_lists()
        build["lists"] = time.process_time() - started
        if count <= _TOP_K_UP_TO:
            started = time.process_time()
            indexes = index_heads(material.block, "ivf")
            build["top-k"] = time.process_time() - started
    cases = []
    keys, values = material.events
    for targets in TARGETS:
        query = material.queries[:, :targets]
        truth = exact_contexts(query, material.block)
        ways: dict[str, Callable[[], Attended]] = {}
        if lists is not None:
            ways["lists"] = partial(_by_lists, lists, query)
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
            cases.append(
                Case(
                    *(material.name, keys.shape[1], count, targets, way),
                    *(timed.seconds("fused"), timed.seconds(way), timed.ratio("fused", way)),
                    build.get(way, 0.0),
                    float(found.mass.mean()),
                    (float(off.median()), float(off.max())),
                    float((off <= MAX_ERROR).double().mean()),
                )
            )
    return cases


def exact_contexts(queries: Tensor, block: KVBlock) -> Tensor:
    """Return the contexts [H, T, d_v] by the definition, in float64."""
    heads = []
    for head, query in enumerate(queries.double()):
        keys, values, weights = (part[head].double() for part in block[:3])
        parts = [
            torch.softmax(part @ keys.T / math.sqrt(keys.shape[1]) + weights, -1) @ values
            for part in torch.split(query, _JUDGED)
        ]
        heads.append(torch.cat(parts))
    return torch.stack(heads)


def _by_rows(query: Tensor, block: KVBlock) -> Attended:
    return Attended.exact(attend_blocks(query, [block]), block.keys.shape[1])


def _by_lists(lists: KeyLists, query: Tensor) -> Attended:
    heads, targets, _ = query.shape
    nothing = PartialSoftmax.empty(heads, targets, lists.table.values.shape[2])
    return lists.attend(query, nothing, max_error=MAX_ERROR)


def _by_top_k(query: Tensor, block: KVBlock, indexes: Indexes) -> Attended:
    options = AttentionOptions(mode="coarse", probes=_PROBES)
    return attend(query, Memory(block, indexes=lambda _kind: indexes), options)
