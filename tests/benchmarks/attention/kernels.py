"""The operator `attend` and its fused path, beside torch's fused kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.attention.attend import attend
from models.attention.partial_softmax import attend_blocks
from tests.benchmarks.attention.long_attention import TARGETS, Material, exact_contexts
from tests.benchmarks.harness.timing import ProgressCallback, Spread, alternate, no_progress

HEADS, WIDTH = 4, 16  # as the recommender's
_REFERENCE = "scaled_dot_product_attention"
_JUDGED = 16  # targets whose answers are compared with float64, which takes much memory


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attending over n rows."""

    rows: int
    targets: int
    seconds: Spread  # the reference's
    attend: Spread  # times the reference's
    fused: Spread
    errors: dict[str, float]  # relative error of the context against float64, of all three

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@torch.inference_mode()
def measure(
    sizes: Sequence[int],
    rounds: int,
    *,
    targets: Sequence[int] = TARGETS,
    progress: ProgressCallback = no_progress,
) -> list[Kernel]:
    """Time and check every path over memories of `sizes` rows, on this thread."""
    found: list[Kernel] = []
    for number, n in enumerate(sizes):
        progress(number, len(sizes))
        drawn = clustered_rows(n, max(targets))
        asked = (replace(drawn, queries=drawn.queries[:, :count]) for count in targets)
        found += [_kernel(material, rounds) for material in asked]
    progress(len(sizes), len(sizes))
    return found


def clustered_rows(n: int, targets: int) -> Material:
    """Draw keys in √n clusters, a bias that falls with age, and queries near some of the keys.

    Logits have a standard deviation of about 2: neither uniform nor a lookup.
    """
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(HEADS, *shape, WIDTH, generator=generator)

    centres = normal(round(math.sqrt(n)))
    member = torch.randint(centres.shape[1], (n,), generator=generator)
    keys = centres[:, member] + 0.5 * normal(n)
    bias = -torch.linspace(1, 0, n) * torch.linspace(0, 2, HEADS)[:, None]  # (H, n)
    near = torch.randint(n, (targets,), generator=generator)
    queries = 1.2 * (keys[:, near] + 0.7 * normal(targets))
    return Material("clustered", keys, normal(n), bias, queries, n)


def _kernel(material: Material, rounds: int) -> Kernel:
    query, (keys, values, bias, _) = material.queries, material.block
    mask = bias[:, None].expand(-1, query.shape[1], -1)  # (H, T, n)

    def reference() -> Tensor:
        return scaled_dot_product_attention(query[None], keys[None], values[None], mask[None])[0]

    def attended() -> Tensor:
        return attend(query, keys, values, bias=bias[:, None]).context

    def fused() -> Tensor:
        return attend_blocks(query, [material.block]).context

    works = {_REFERENCE: reference, "attend": attended, "fused": fused}
    timed = alternate(works, rounds)
    truth = exact_contexts(replace(material, queries=query[:, :_JUDGED]))
    return Kernel(
        material.rows,
        query.shape[1],
        timed.seconds(_REFERENCE),
        timed.ratio("attend", _REFERENCE),
        timed.ratio("fused", _REFERENCE),
        {
            name: float((work()[:, :_JUDGED].double() - truth).norm() / truth.norm())
            for name, work in works.items()
        },
    )
