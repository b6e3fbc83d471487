"""The operator beside torch's fused kernel, and two-stage retrieval beside exact attention."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.attention.kv_memory import KeyValueMemory
from models.attention.memory_query import MemoryQuery
from models.attention.partial_softmax import KVBlock, attend_blocks
from models.history.attention_options import DEFAULT_K
from models.index.two_stage import attend_retrieved, index_heads
from tests.benchmarks.harness.timing import ProgressCallback, Spread, alternate, no_progress

HEADS, WIDTH = 4, 16  # as the recommender's
_REFERENCE = "scaled_dot_product_attention"
_JUDGED = 16  # targets whose answers are compared with float64, which takes much memory
_KINDS: tuple[Literal["flat", "ivf"], ...] = ("flat", "ivf")


@dataclass(frozen=True, slots=True)
class Exact:
    """Attending over all n rows, by `attend` and by its fused path."""

    rows: int
    targets: int
    seconds: Spread  # the reference's
    attend: Spread  # times the reference's
    fused: Spread
    errors: dict[str, float]  # relative error of the context against float64, of all three


@dataclass(frozen=True, slots=True)
class Coarse:
    """Retrieving k of n rows first, beside the fused path over all of them."""

    kind: str
    rows: int
    targets: int
    k: int
    seconds: Spread  # with the indexes at hand
    ratio: Spread  # times exact
    build: float  # seconds to index the memory, all heads
    exact_seconds: float
    recall: float  # of the k rows of largest logit
    mass: float  # mean share of the softmax that was attended, as estimated
    true_mass: float
    error: float  # relative, of the context against float64


@dataclass(frozen=True, slots=True)
class Kernels:
    """All that was measured, and from where on retrieval is the faster one."""

    exact: Sequence[Exact]
    coarse: Sequence[Coarse]

    def crossover(self, kind: str, targets: int, *, build: bool) -> float | None:
        """Rows from which two stages take less time than exact; None = not among those measured.

        Between two sizes the logarithms of ratio and rows are taken to lie on a line.

        Args:
            kind: of the index.
            targets: how many ask at once.
            build: count the indexing, as when an index serves one request only.
        """
        last: tuple[float, float] | None = None
        for each in self.coarse:
            if each.kind != kind or each.targets != targets or each.k >= each.rows:
                continue
            ratio = each.ratio.median + (each.build / each.exact_seconds if build else 0.0)
            here = (math.log(each.rows), math.log(ratio))
            if here[1] <= 0:
                if last is None or last[1] <= 0:
                    return float(each.rows)
                share = last[1] / (last[1] - here[1])
                return math.exp(last[0] + share * (here[0] - last[0]))
            last = here
        return None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        targets = sorted({each.targets for each in self.coarse})
        return {
            "heads": HEADS,
            "width": WIDTH,
            "exact": [
                {
                    "rows": each.rows,
                    "targets": each.targets,
                    "reference_seconds": each.seconds.as_dict(),
                    "attend_ratio": each.attend.as_dict(),
                    "fused_ratio": each.fused.as_dict(),
                    "errors": each.errors,
                }
                for each in self.exact
            ],
            "coarse": [
                {
                    "kind": each.kind,
                    "rows": each.rows,
                    "targets": each.targets,
                    "k": each.k,
                    "seconds": each.seconds.as_dict(),
                    "ratio": each.ratio.as_dict(),
                    "build_seconds": each.build,
                    "recall": each.recall,
                    "mass": each.mass,
                    "true_mass": each.true_mass,
                    "error": each.error,
                }
                for each in self.coarse
            ],
            "crossover_rows": {
                f"{kind}, {count} targets, {'built for it' if build else 'index at hand'}": (
                    self.crossover(kind, count, build=build)
                )
                for kind in _KINDS
                for count in targets
                for build in (False, True)
            },
        }


def measure(
    sizes: Sequence[int],
    rounds: int,
    *,
    targets: Sequence[int] = (1, 100),
    k: int = DEFAULT_K,
    progress: ProgressCallback = no_progress,
) -> Kernels:
    """Time and check every path over memories of `sizes` rows, on this thread."""
    exacts, coarses = [], []
    for number, n in enumerate(sizes):
        progress(number, len(sizes))
        memory, queries = drawn_memory(n, max(targets))
        indexes = {}
        for kind in _KINDS:
            started = time.process_time()
            indexes[kind] = (index_heads(memory, kind), time.process_time() - started)
        for count in targets:
            query = queries[:count]  # (T, H, d)
            exacts.append(_exact(query, memory, rounds))
            for kind, (index, build) in indexes.items():
                coarses.append(_coarse(query, memory, kind, index, build, min(k, n), rounds))
    progress(len(sizes), len(sizes))
    return Kernels(exacts, coarses)


# ------------------------------------------------------------------------------ the parts


def drawn_memory(n: int, targets: int) -> tuple[KeyValueMemory, Tensor]:
    """Keys in √n clusters, a bias that falls with age, and queries near some of the keys.

    Logits have a standard deviation of about 2: neither uniform nor a lookup.
    """
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    centres = normal(round(math.sqrt(n)), HEADS, WIDTH)
    member = torch.randint(len(centres), (n,), generator=generator)
    keys = centres[member] + 0.5 * normal(n, HEADS, WIDTH)
    bias = -torch.linspace(1, 0, n) * torch.linspace(0, 2, HEADS)[:, None]  # (H, n)
    near = torch.randint(n, (targets,), generator=generator)
    queries = 1.2 * (keys[near] + 0.7 * normal(targets, HEADS, WIDTH))
    return KeyValueMemory(keys, normal(n, HEADS, WIDTH), bias=bias), queries


@torch.inference_mode()
def _exact(query: Tensor, memory: KeyValueMemory, rounds: int) -> Exact:
    q, keys, values, bias = heads_first(query, memory)
    mask = bias.expand(-1, q.shape[1], -1)  # (H, T, n)

    def reference() -> Tensor:
        return scaled_dot_product_attention(q[None], keys[None], values[None], mask[None])[0]

    def fused() -> Tensor:
        return attend_blocks(q, [KVBlock(keys, values, bias[:, 0])]).context

    def attended() -> Tensor:
        return MemoryQuery(query, memory).attend().context.transpose(0, 1)

    works = {_REFERENCE: reference, "attend": attended, "fused": fused}
    timed = alternate(works, rounds)
    truth = float64_attention(query[:_JUDGED], memory).context
    return Exact(
        len(memory),
        len(query),
        timed.seconds(_REFERENCE),
        timed.ratio("attend", _REFERENCE),
        timed.ratio("fused", _REFERENCE),
        {
            name: relative_error(work().transpose(0, 1)[:_JUDGED], truth)
            for name, work in works.items()
        },
    )


@torch.inference_mode()
def _coarse(
    query: Tensor,
    memory: KeyValueMemory,
    kind: str,
    indexes: Any,
    build: float,
    k: int,
    rounds: int,
) -> Coarse:
    q, keys, values, bias = heads_first(query, memory)
    timed = alternate(
        {
            "exact": lambda: attend_blocks(q, [KVBlock(keys, values, bias[:, 0])]).context,
            "coarse": lambda: attend_retrieved(query, memory, indexes, k),
        },
        rounds,
    )
    found = attend_retrieved(query[:_JUDGED], memory, indexes, k)
    truth = float64_attention(query[:_JUDGED], memory)
    wanted = truth.logits.topk(k, dim=2).indices
    hits = torch.zeros(truth.logits.shape, dtype=torch.bool).scatter_(2, wanted, True)
    seen = found.rows.clamp(min=0)
    inside = hits.gather(2, seen) & (found.rows >= 0)
    held = truth.weights.gather(2, seen) * (found.rows >= 0)
    return Coarse(
        kind,
        len(memory),
        len(query),
        k,
        timed.seconds("coarse"),
        timed.ratio("coarse", "exact"),
        build,
        timed.seconds("exact").median,
        float(inside.sum() / wanted.numel()),
        float(found.mass.mean()),
        float(held.sum(2).mean()),
        relative_error(found.context, truth.context),
    )


@dataclass(frozen=True, slots=True)
class _Truth:
    logits: Tensor  # [T, H, n]
    weights: Tensor  # [T, H, n]
    context: Tensor  # [T, H, d]


def float64_attention(query: Tensor, memory: KeyValueMemory) -> _Truth:
    """The definition, in float64 and in steps."""
    q, keys, values, bias = (x.double() for x in heads_first(query, memory))
    logits = q @ keys.mT / math.sqrt(q.shape[-1]) + bias  # (H, T, n)
    weights = torch.softmax(logits, -1)
    return _Truth(*(x.transpose(0, 1) for x in (logits, weights, weights @ values)))


def heads_first(query: Tensor, memory: KeyValueMemory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [H, T, d], keys and values [H, n, d], bias [H, 1, n]."""
    bias = cast(Tensor, memory.bias)  # `drawn_memory` gives one
    return (
        query.transpose(0, 1),
        memory.keys.transpose(0, 1),
        memory.values.transpose(0, 1),
        bias[:, None],
    )


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Size of the difference over the size of the truth, over all targets and heads."""
    return float((found.double() - truth).norm() / truth.norm())
