"""One way to attend: exact, and coarse over the rows that FAISS names, against a float64 loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention.attend import AttentionOptions
from models.attention.partial_softmax import (
    Attended,
    KVBlock,
    PartialSoftmax,
    attend_blocks,
    merge_partials,
)
from models.index import memory_attention
from models.index.ann_index import IndexKind
from models.index.memory_attention import Memory, as_mask, attend, index_heads, retrieve
from tests.support import reference

quick = settings(max_examples=80, deadline=None, derandomize=True)
INF = math.inf
D = WIDTH = 4


@dataclass
class Case:
    """Queries over a memory, of which each target may not see some rows."""

    query: Tensor  # [H, T, d]
    near: KVBlock
    temperature: float
    hard: bool

    def options(self, **more: Any) -> AttentionOptions:
        return AttentionOptions(temperature=self.temperature, hard=self.hard, **more)

    def logits(self) -> np.ndarray[Any, Any]:
        """The loop's logits [H, T, n], -inf where a target does not see a row."""
        heads, targets, _ = self.query.shape
        count = self.near.keys.shape[1]
        seen = np.ones((targets, count))
        if self.near.visible is not None:
            seen = self.near.visible.double().numpy()
        return np.stack([
            reference.logits(
                self.query[head].double().numpy(),
                self.near.keys[head].double().numpy(),
                np.tile(self.near.bias[head].double().numpy(), (targets, 1)),
                seen,
                reference.scaled_dot,
            )
            for head in range(heads)
        ])  # fmt: skip

    def over_best(self, k: int) -> tuple[Any, Any]:
        """The loop's contexts [H, T, V] over the k rows of largest logit, and their mass."""
        scores = self.logits()
        context = np.zeros((*scores.shape[:2], WIDTH))
        mass = np.ones(scores.shape[:2])
        for h, t in np.ndindex(*mass.shape):
            order = np.argsort(-scores[h, t], kind="stable")[:k]
            best = {int(row) for row in order if scores[h, t, row] > -INF}
            kept = [x if row in best else -INF for row, x in enumerate(scores[h, t])]
            weights = reference.softmax(kept, self.temperature, self.hard)
            for weight, value in zip(weights, self.near.values[h].double().numpy(), strict=True):
                context[h, t] += weight * value
            whole = reference.softmax(scores[h, t].tolist(), self.temperature, self.hard)
            if sum(whole) > 0:
                mass[h, t] = sum(whole[row] for row in best)
        return context, mass


@st.composite
def cases(draw: st.DrawFn, *, largest: int = 14) -> Case:
    heads, targets = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n = draw(st.integers(0, largest))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).float()

    bias, visible = normal(heads, n), None
    hidden = draw(st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    bias[torch.from_numpy(rng.random((heads, n)) < hidden)] = -INF
    if draw(st.booleans()):
        visible = torch.from_numpy(rng.random((targets, n)) > draw(st.sampled_from([0.1, 0.5])))
    return Case(
        normal(heads, targets, D),
        KVBlock(normal(heads, n, D), normal(heads, n, WIDTH), bias, visible),
        draw(st.sampled_from([1.0, 0.5, 3.0])),
        draw(st.booleans()),
    )


def near(found: Tensor, wanted: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=tolerance, atol=tolerance)


@quick
@given(cases(), st.sampled_from(["exact", "auto"]))
def test_every_row_is_attended(case: Case, mode: Any) -> None:
    """Exact attention over any memory is that of the loop, with all of the mass and no error."""
    found = attend(case.query, Memory(case.near), case.options(mode=mode))
    context, mass = case.over_best(case.near.keys.shape[1])
    near(found.partial.context, context)
    near(found.mass, mass)
    assert not found.error.any()
    assert found.rows is None


@quick
@given(cases(), st.integers(1, 16), st.sampled_from([1, 1 << 22]))
def test_the_best_rows_of_each_head_are_attended(case: Case, k: int, gathered: int) -> None:
    """Coarse attention is the loop's softmax over the true top k, whatever a target may see.

    Targets may be attended one by one, or all at once.
    """
    with patch.object(memory_attention, "_GATHERED", gathered):
        found = attend(case.query, Memory(case.near), case.options(mode="coarse", k=k))
    context, mass = case.over_best(k)
    near(found.partial.context, context)
    near(found.mass, mass)
    assert found.rows is not None
    scores = case.logits()
    for h, t in np.ndindex(*scores.shape[:2]):
        rows = [row for row in found.rows[h, t].tolist() if row >= 0]
        assert rows == sorted(set(rows))
        best = np.sort(scores[h, t])[::-1][:k]
        np.testing.assert_allclose(np.sort(scores[h, t][rows])[::-1], best[best > -INF], atol=1e-5)
        assert int(found.scanned[h, t]) == len(rows)


@quick
@given(cases(), st.integers(1, 16), st.integers(1, 3))
def test_probed_lists_give_exact_attention_over_what_they_find(
    case: Case, k: int, probes: int
) -> None:
    """With probes the rows are some of those that may be seen, and their mass is true."""
    options = case.options(mode="coarse", k=k, probes=probes)
    rows = retrieve(case.query, Memory(case.near), options)
    found = attend(case.query, Memory(case.near), options)
    seen = as_mask(rows, case.near.keys.shape[1]).numpy()
    scores = case.logits()
    assert (scores[seen] > -INF).all()
    assert (seen.sum(2) <= k).all()
    kept = Case(case.query, case.near, case.temperature, case.hard)
    kept.logits = lambda: np.where(seen, scores, -INF)  # type: ignore[method-assign]
    near(found.partial.context, kept.over_best(k)[0])


def test_far_rows_are_retrieved_beside_near_ones() -> None:
    """Near and far rows compete for the k places, and a target's own far row is none of them."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    every = KVBlock(normal(2, 60, D), normal(2, 60, WIDTH), normal(2, 60))
    parts = [KVBlock(*(each[:, part] for each in every[:3])) for part in (slice(20), slice(20, 60))]
    own = torch.tensor([-1, 3, 39])
    query = normal(2, 3, D)
    memory = Memory(parts[0], PlainRows(parts[1]), own)
    visible = torch.arange(60) != own[:, None] + torch.where(own < 0, -1, 20)[:, None]
    whole = Memory(every._replace(visible=visible))
    for options in (AttentionOptions(mode="exact"), AttentionOptions(mode="coarse", k=7)):
        found, wanted = attend(query, memory, options), attend(query, whole, options)
        torch.testing.assert_close(found.partial.context, wanted.partial.context)
        torch.testing.assert_close(found.mass, wanted.mass)
        assert (found.rows is None) or torch.equal(found.rows, wanted.rows)  # type: ignore[arg-type]


def test_indexes_are_searched_and_not_built_again() -> None:
    """A memory that keeps its indexes is searched through them, by the kind that is asked for."""
    generator = torch.Generator().manual_seed(5)
    keys, values = (torch.randn(2, 50, 4, generator=generator) for _ in range(2))
    block = KVBlock(keys, values, torch.zeros(2, 50))
    asked: list[IndexKind] = []

    def kept(kind: IndexKind) -> Any:
        asked.append(kind)
        return index_heads(block, kind)

    memory = Memory(block, indexes=kept)
    query = torch.randn(2, 3, 4, generator=generator)
    for probes in (None, 2):
        retrieve(query, memory, AttentionOptions(mode="coarse", k=4, probes=probes))
    assert asked == ["flat", "ivf"]


class PlainRows:
    """Far rows that hold what they are."""

    def __init__(self, block: KVBlock) -> None:
        self.block = block

    def __len__(self) -> int:
        return self.block.keys.shape[1]

    def attend(
        self, query: Tensor, near: PartialSoftmax, options: AttentionOptions, own: Tensor | None
    ) -> Attended:
        seen = None if own is None else torch.arange(len(self)) != own[:, None]
        far = attend_blocks(query, [self.block._replace(visible=seen)])
        return Attended.exact(merge_partials(near, far), len(self))

    def nearest(self, query: Tensor, count: int, probes: int | None) -> Tensor:
        return torch.arange(len(self)).expand(*query.shape[:2], -1)

    def gather(self, places: Tensor) -> KVBlock:
        head = torch.arange(len(places))[:, None, None]
        return KVBlock(*(each[head, places] for each in self.block[:3]))
