"""Two-stage attention over k retrieved rows against a float64 loop, and the mass they hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention import softmax_mass
from models.attention.kv_memory import KeyValueMemory
from models.attention.memory_query import MemoryQuery
from models.attention.scorers import Scorer, additive, cosine, scaled_dot
from models.attention.softmax_mass import estimate_mass
from models.index.ann_index import IndexKind
from models.index.two_stage import attend_retrieved, index_heads
from tests.support import reference

quick = settings(max_examples=60, deadline=None, derandomize=True)
INF = math.inf
SCORERS: dict[str, Scorer] = {
    "scaled_dot": scaled_dot,
    "cosine": cosine,
    "additive": additive,
}
ADDITIVE = reference.additive(np.eye(4), np.eye(4), np.ones(4))
LOOPS: dict[str, reference.Score] = {
    "scaled_dot": reference.scaled_dot,
    "cosine": reference.cosine,
    "additive": ADDITIVE,
}


def random_memory(n: int, heads: int = 2, *, seed: int = 0, bias: str = "none") -> KeyValueMemory:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"none": None, "row": (n,), "head": (heads, n)}
    shape = shapes[bias]
    return KeyValueMemory(
        torch.randn(n, heads, 4, generator=generator),
        torch.randn(n, heads, 3, generator=generator),
        bias=None if shape is None else torch.randn(shape, generator=generator),
    )


@dataclass
class Case:
    """One drawn lookup."""

    query: Tensor
    memory: KeyValueMemory
    scorer: str
    temperature: float
    hard: bool
    kind: IndexKind

    @property
    def options(self) -> dict[str, Any]:
        return {
            "score": SCORERS[self.scorer],
            "temperature": self.temperature,
            "hard": self.hard,
        }

    def logits(self) -> np.ndarray[Any, Any]:
        """The loop's logits [T, H, n]."""
        out = np.zeros((len(self.query), self.memory.heads, len(self.memory)))
        for h in range(self.memory.heads):
            own, bias = self.memory.head_bias(h), np.zeros(out[:, h].shape)
            out[:, h] = reference.logits(
                self.query[:, h].double().numpy(),
                self.memory.keys[:, h].double().numpy(),
                bias if own is None else bias + own.double().numpy(),
                np.ones(bias.shape),
                LOOPS[self.scorer],
            )
        return out

    def attended(self, rows: Tensor) -> tuple[Any, Any, Any]:
        """The loop's weights [T, H, k], context [T, H, V] and mass [T, H] over rows [T, H, k]."""
        scores = self.logits()
        weights, context = np.zeros(rows.shape), np.zeros((*rows.shape[:2], 3))
        mass = np.ones(rows.shape[:2])
        for t, h in np.ndindex(*mass.shape):
            chosen = rows[t, h].tolist()
            kept = [scores[t, h, r] if r >= 0 else -INF for r in chosen]
            weights[t, h] = reference.softmax(kept, self.temperature, self.hard)
            for weight, r in zip(weights[t, h], chosen, strict=True):
                context[t, h] += weight * self.memory.values[r, h].double().numpy()
            whole = reference.softmax(scores[t, h].tolist(), self.temperature, self.hard)
            if sum(whole) > 0:
                mass[t, h] = sum(whole[r] for r in set(chosen) if r >= 0)
        return weights, context, mass


@st.composite
def cases(
    draw: st.DrawFn, *, largest: int = 9, kinds: tuple[IndexKind, ...] = get_args(IndexKind)
) -> Case:
    heads, targets, n = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, largest)),
    )
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    biases = draw(st.sampled_from(["none", "row", "head"]))
    memory = random_memory(n, heads, seed=seed, bias=biases)
    if memory.bias is not None and draw(st.booleans()):
        hidden = rng.random(memory.bias.shape) < draw(st.sampled_from([0.3, 0.6, 1.0]))
        memory.bias[torch.from_numpy(hidden)] = -INF
    return Case(
        query=torch.from_numpy(rng.standard_normal((targets, heads, 4))).float(),
        memory=memory,
        scorer=draw(st.sampled_from(sorted(SCORERS))),
        temperature=draw(st.sampled_from([1.0, 0.5, 3.0])),
        hard=draw(st.booleans()),
        kind=draw(st.sampled_from(kinds)),
    )


def near(found: Tensor, wanted: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(
        found.detach().double().numpy(), np.asarray(wanted), rtol=tolerance, atol=tolerance
    )


# ---------------------------------------------------------------------------- k = n


@quick
@given(cases(), st.integers(0, 3))
def test_all_rows_give_exact_attention(case: Case, more: int) -> None:
    """With k ≥ n the two stages equal the loop to 1e-5, whatever the form or the index."""
    n = len(case.memory)
    indexes = index_heads(case.memory, case.kind, score=case.options["score"])
    found = attend_retrieved(case.query, case.memory, indexes, max(1, n + more), **case.options)
    weights, context, _ = case.attended(torch.arange(n).expand(*case.query.shape[:2], n))
    near(found.weights, weights)
    near(found.context, context)
    near(found.mass, np.ones(case.query.shape[:2]))
    assert found.rows.tolist() == [[list(range(n))] * case.memory.heads] * len(case.query)
    lookup = MemoryQuery(case.query, case.memory, case.options["score"])
    whole = lookup.attend(temperature=case.temperature, hard=case.hard)
    near(whole.weights, weights)
    near(whole.context, context)


# ---------------------------------------------------------------------------- small k


@quick
@given(cases(largest=14), st.integers(1, 8))
def test_few_rows_give_exact_attention_over_them(case: Case, k: int) -> None:
    """Retrieved rows are distinct, visible and ascending, and attended as in the loop."""
    indexes = index_heads(case.memory, case.kind, score=case.options["score"])
    found = attend_retrieved(case.query, case.memory, indexes, k, **case.options)
    assert found.rows.shape == found.weights.shape
    weights, context, mass = case.attended(found.rows)
    near(found.weights, weights)
    near(found.context, context)
    near(found.mass, mass)
    if k < len(case.memory):
        scores = case.logits()
        for t, h in np.ndindex(*scores.shape[:2]):
            rows = [r for r in found.rows[t, h].tolist() if r >= 0]
            assert rows == sorted(set(rows))
            assert (scores[t, h, rows] > -INF).all()


@quick
@given(cases(largest=14, kinds=("flat",)), st.integers(1, 8))
def test_a_flat_index_finds_the_best_rows(case: Case, k: int) -> None:
    """Over a flat index the k rows are those of highest logit, whatever rows are hidden."""
    if case.scorer == "additive":
        case.scorer = "scaled_dot"
    indexes = index_heads(case.memory, "flat", score=case.options["score"])
    found = attend_retrieved(case.query, case.memory, indexes, k, **case.options)
    scores = case.logits()
    for t, h in np.ndindex(*scores.shape[:2]):
        wanted = np.sort(scores[t, h])[::-1][:k]
        rows = found.rows[t, h]
        kept = scores[t, h][rows[rows >= 0].tolist()]
        kept = np.sort(kept[kept > -INF])[::-1]
        np.testing.assert_allclose(kept, wanted[wanted > -INF], atol=1e-5)


def test_nothing_visible_gives_nothing() -> None:
    """Without visible rows weights and context are 0 and the mass is 1."""
    memory = random_memory(50)
    query = torch.ones(3, 2, 4)
    memory = replace(memory, bias=torch.full((50,), -INF))
    found = attend_retrieved(query, memory, index_heads(memory, "ivf"), 4)
    assert (found.rows == -1).all()
    assert (found.weights == 0).all()
    assert (found.context == 0).all()
    assert (found.mass == 1).all()


def test_gradients_flow_through_what_was_retrieved() -> None:
    """The contexts over retrieved rows pass gradcheck for query, keys and values."""
    memory = random_memory(12)
    indexes = index_heads(memory, "flat")
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, 4, dtype=torch.float64, generator=generator).requires_grad_()
    keys, values = (x.double().requires_grad_() for x in (memory.keys, memory.values))

    def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend_retrieved(query, KeyValueMemory(keys, values), indexes, 3).context

    assert torch.autograd.gradcheck(run, (query, keys, values))


# ---------------------------------------------------------------------------- mass and recall


def shaped_memory(sharpness: float, n: int = 20_000) -> tuple[Tensor, KeyValueMemory]:
    """Keys around a hundred centres, and queries; logits spread more as `sharpness` grows."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((100, 2, 16))[rng.integers(0, 100, n)]
    keys = keys + 0.5 * rng.standard_normal((n, 2, 16))
    query = sharpness * rng.standard_normal((20, 2, 16))
    memory = KeyValueMemory(
        torch.from_numpy(keys).float(), torch.from_numpy(rng.standard_normal((n, 2, 3))).float()
    )
    return torch.from_numpy(query).float(), memory


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0, 8.0])
def test_the_estimated_mass_is_close(
    sharpness: float, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """The mean error of the estimated mass is below 0.02, from diffuse to peaked attention."""
    query, memory = shaped_memory(sharpness)
    found = attend_retrieved(query, memory, index_heads(memory, "flat"), 64)
    true = MemoryQuery(query, memory).attend().weights.gather(2, found.rows).sum(2)
    off = (found.mass - true).abs()
    record_testsuite_property(f"mass at sharpness {sharpness}", round(true.mean().item(), 4))
    record_testsuite_property(f"mass error at sharpness {sharpness}", round(off.mean().item(), 4))
    assert off.mean() < 0.02
    assert off.max() < 0.1


def test_the_drawn_range_of_sharpness_is_wide() -> None:
    """The generated memories span a mass of below 0.1 to above 0.9."""
    masses = []
    for sharpness in (0.3, 8.0):
        query, memory = shaped_memory(sharpness)
        found = attend_retrieved(query, memory, index_heads(memory, "flat"), 64)
        masses.append(found.mass.mean().item())
    assert masses[0] < 0.1
    assert masses[1] > 0.9


def test_a_small_tail_is_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail within the sample size is summed exactly."""
    memory = random_memory(500, bias="row")
    query = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.randint(500, (4, 2, 1), generator=torch.Generator().manual_seed(1))
    rows = torch.cat([rows, torch.full_like(rows, -1)], dim=2)
    case = Case(query, memory, "scaled_dot", 0.7, False, "flat")
    _, _, true = case.attended(rows)
    monkeypatch.setattr(softmax_mass, "SAMPLE", 500)
    near(estimate_mass(MemoryQuery(query, memory), rows, temperature=0.7), true)
    monkeypatch.setattr(softmax_mass, "SAMPLE", 499)
    estimated = estimate_mass(MemoryQuery(query, memory), rows, temperature=0.7)
    assert not np.allclose(estimated, true, rtol=1e-5)
    near(estimated, true, 0.1)


def test_mass_sample_is_drawn_from_visible_rows() -> None:
    """The sample is drawn from visible rows alone, so the mass of few visible rows is exact."""
    query, memory = shaped_memory(1.0)
    bias = torch.full((20_000,), -INF)
    bias[5_000:6_500] = 0
    memory = replace(memory, bias=bias)
    found = attend_retrieved(query, memory, index_heads(memory, "flat"), 16)
    near(
        found.mass,
        MemoryQuery(query, memory).attend().weights.gather(2, found.rows).sum(2),
    )


def test_rows_missed_by_the_sample_count_as_the_worst_retrieved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that the sample missed count as much as the worst retrieved row."""
    n = 100
    bias = torch.full((n + 1, n), -INF)
    bias[n] = 0  # the last head sees every row
    for row in range(n):
        bias[row, [row, (row + 1) % n]] = 0  # the others two each, one of them retrieved
    keys, values = torch.zeros(n, n + 1, 4), torch.zeros(n, n + 1, 3)  # all logits are equal
    rows = torch.arange(n + 1).clamp(max=n - 1)[None, :, None]
    lookup = MemoryQuery(torch.zeros(1, n + 1, 4), KeyValueMemory(keys, values, bias))
    monkeypatch.setattr(softmax_mass, "SAMPLE", 5)
    mass = estimate_mass(lookup, rows)
    near(mass[0, :n], np.full(n, 0.5))
    near(mass[0, n], 1 / n)


def test_hard_mass_says_whether_the_winner_is_there() -> None:
    """Under hard attention the mass is 1 if the best row is retrieved, else 0."""
    memory = random_memory(40)
    query = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    best = MemoryQuery(query, memory).attend(hard=True).weights.argmax(2, keepdim=True)
    lookup = MemoryQuery(query, memory)
    assert (estimate_mass(lookup, best, hard=True) == 1).all()
    assert (estimate_mass(lookup, (best + 1) % 40, hard=True) == 0).all()


@pytest.mark.parametrize("kind", get_args(IndexKind))
def test_recall_and_mass_of_few_rows_are_reported(
    kind: IndexKind, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Recall@k of each structure against exact attention's best rows, with the mass it held."""
    query, memory = shaped_memory(2.0, n=6000)
    indexes = index_heads(memory, kind)
    weights = MemoryQuery(query, memory).attend().weights
    for k in (8, 64):
        found = attend_retrieved(query, memory, indexes, k)
        wanted = weights.topk(k, dim=2)
        share = reference.recall(
            found.rows.flatten(0, 1).numpy(), wanted.indices.flatten(0, 1).numpy()
        )
        record_testsuite_property(f"recall@{k} {kind}", round(share, 3))
        record_testsuite_property(f"mass@{k} {kind}", round(found.mass.mean().item(), 3))
        assert share > (0.999 if kind == "flat" else 0.75)
        held = weights.gather(2, found.rows).sum(2)
        assert (held <= wanted.values.sum(2) + 1e-5).all()


def test_the_additive_proxy_is_rescored() -> None:
    """Rows are found by the dot product, but those kept are best by the additive score."""
    memory = random_memory(500)
    query = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(3))
    score = additive
    with torch.inference_mode():
        found = attend_retrieved(
            query, memory, index_heads(memory, "flat", score=score), 10, score=score
        )
        proxy = attend_retrieved(query, memory, index_heads(memory, "flat"), 40).rows
        kept = MemoryQuery(query, memory, score=score).logits_of_each(proxy).topk(10, dim=2).indices
    assert torch.equal(found.rows, proxy.gather(2, kept).sort(dim=2).values)


# ---------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k: must be at least 1, got 0"),
        ({"query": torch.zeros(5, 3, 4)}, r"query: must be \[T, 2, d\], got \[5, 3, 4\]"),
        ({"query": torch.zeros(5, 4)}, "query: must be"),
        ({"indexes": []}, "indexes: must be 2 of 9 rows each"),
        ({"indexes": index_heads(random_memory(8), "flat")}, "indexes: must be 2 of 9 rows each"),
        ({"temperature": -1.0}, "temperature: must be finite and greater than 0"),
    ],
)
def test_invalid_argument_is_named(change: dict[str, Any], message: str) -> None:
    """An invalid argument is refused by name, with what is allowed."""
    memory = random_memory(9)
    arguments: dict[str, Any] = {
        "query": torch.zeros(5, 2, 4),
        "memory": memory,
        "indexes": index_heads(memory, "flat"),
        "k": 3,
    }
    with pytest.raises(ValueError, match=message):
        attend_retrieved(**(arguments | change))


def test_ties_go_to_the_lowest_row_retrieved() -> None:
    """Hard retrieval among equal rows is the lookup of the first."""
    memory = random_memory(30)
    same = replace(memory, keys=memory.keys[:1].expand(30, -1, -1).contiguous())
    same = replace(same, bias=torch.zeros(30).masked_fill(torch.arange(30) < 12, -INF))
    found = attend_retrieved(same.keys[:1], same, index_heads(same, "flat"), 18, hard=True)
    assert torch.equal(found.context[0], same.values[12])
