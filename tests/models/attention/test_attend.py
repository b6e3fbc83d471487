"""The attention operator and its scorers, compared with loops in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention.attend import (
    Attention,
    HeadProjections,
    Scorer,
    additive,
    attend,
    cosine,
    exclude_self,
    merge_heads,
    normalize,
    scaled_dot,
    split_heads,
)
from models.attention.partial_softmax import query_jacobian
from tests.support import reference

quick = settings(max_examples=150, deadline=None, derandomize=True)
few = settings(max_examples=40, deadline=None, derandomize=True)
INF = math.inf


@dataclass
class Problem:
    """One drawn case: H heads, T targets, n rows; bias and mask in a broadcast shape or absent."""

    query: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor | None
    visible: Tensor | None
    scorer: str
    temperature: float
    hard: bool

    @property
    def score(self) -> Scorer:
        if self.scorer == "additive":
            return additive
        return scaled_dot if self.scorer == "scaled_dot" else cosine

    @property
    def options(self) -> dict[str, Any]:
        return {
            "bias": self.bias,
            "visible": self.visible,
            "score": self.score,
            "temperature": self.temperature,
        }

    def reference(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Weights [H, T, n] and contexts [H, T, V] of the loop."""
        heads, targets, rows = len(self.query), self.query.shape[1], self.keys.shape[1]
        full = (heads, targets, rows)
        bias = np.zeros(full) if self.bias is None else self.bias.double().expand(full).numpy()
        seen = np.ones(full) if self.visible is None else self.visible.expand(full).numpy()
        score: reference.Score = reference.cosine
        if self.scorer == "scaled_dot":
            score = reference.scaled_dot
        if self.scorer == "additive":
            eye = np.eye(self.query.shape[-1])
            score = reference.additive(eye, eye, np.ones(len(eye)))
        arrays = [x.double().numpy() for x in (self.query, self.keys, self.values)]
        each = [
            reference.attend(
                arrays[0][h],
                arrays[1][h],
                arrays[2][h],
                bias[h],
                seen[h],
                score=score,
                temperature=self.temperature,
                hard=self.hard,
            )
            for h in range(heads)
        ]
        return np.stack([w for w, _ in each]), np.stack([c for _, c in each])


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    dtype: torch.dtype = torch.float64,
    largest: int = 7,
    temperatures: tuple[float, ...] = (1.0, 0.1, 0.7, 5.0),
    hard: bool = False,
    rows: int = 0,
    scorers: Sequence[str] = ("scaled_dot", "cosine", "additive"),
) -> Problem:
    heads = draw(st.integers(1, 3))
    targets = draw(st.integers(1, 4))
    n = draw(st.integers(rows, largest))
    dim, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shapes = [(1, 1, n), (heads, 1, n), (1, targets, n), (heads, targets, n), (n,)]

    def numbers(*shape: int) -> Tensor:
        # Hard problems use small whole numbers: exact ties, and no near ones.
        drawn = rng.integers(-2, 3, shape) if hard else rng.standard_normal(shape)
        return torch.from_numpy(drawn.astype(np.float64)).to(dtype)

    bias = visible = None
    if draw(st.booleans()):
        bias = numbers(*draw(st.sampled_from(shapes)))
        if draw(st.booleans()):
            bias[torch.from_numpy(rng.random(bias.shape) < 0.3)] = -INF
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.0, 0.3, 0.8]))
        visible = torch.from_numpy(rng.random(draw(st.sampled_from(shapes))) < share)
    scorer = "scaled_dot" if hard else draw(st.sampled_from(scorers))
    return Problem(
        query=numbers(heads, targets, 4 if hard else dim),  # √4 = 2 keeps whole numbers exact
        keys=numbers(heads, n, 4 if hard else dim),
        values=numbers(heads, n, width),
        bias=bias,
        visible=visible,
        scorer=scorer,
        temperature=draw(st.sampled_from(temperatures)),
        hard=hard,
    )


def close(found: Tensor, wanted: Any, tolerance: float) -> None:
    wanted = wanted.detach().numpy() if isinstance(wanted, Tensor) else wanted
    np.testing.assert_allclose(
        found.detach().double().numpy(), wanted, rtol=tolerance, atol=tolerance
    )


# ---------------------------------------------------------------------------- against the loop


@quick
@given(problems() | problems(dtype=torch.float32, temperatures=(1.0, 0.5, 3.0)))
def test_every_form_equals_the_loop(problem: Problem) -> None:
    """Weights and contexts of every scorer, mask, bias and temperature, in both precisions."""
    found = attend(problem.query, problem.keys, problem.values, **problem.options)
    weights, context = problem.reference()
    assert found.weights.dtype == found.context.dtype == problem.query.dtype
    tolerance = 1e-9 if problem.query.dtype == torch.float64 else 1e-5
    close(found.weights, weights, tolerance)
    close(found.context, context, tolerance)


@quick
@given(problems(hard=True))
def test_hard_attention_equals_the_loop(problem: Problem) -> None:
    found = attend(problem.query, problem.keys, problem.values, hard=True, **problem.options)
    weights, context = problem.reference()
    assert np.array_equal(found.weights.numpy(), weights)
    assert np.array_equal(found.context.numpy(), context)


@quick
@given(problems(hard=True, temperatures=(1e-30, 1e-3)))
def test_a_tiny_temperature_equals_the_loop(problem: Problem) -> None:
    found = attend(problem.query, problem.keys, problem.values, **problem.options)
    problem.hard = False
    weights, context = problem.reference()
    close(found.weights, weights, 1e-9)
    close(found.context, context, 1e-9)


# ---------------------------------------------------------------------------- gradients


def differentiable(problem: Problem) -> list[Tensor]:
    """Query, keys, values and finite biases, as leaves."""
    leaves = [problem.query, problem.keys, problem.values]
    if problem.bias is not None:
        leaves.append(problem.bias.masked_fill(problem.bias == -INF, 0.0))
    return [leaf.clone().requires_grad_() for leaf in leaves]


def weights_and_context(*inputs: Tensor, **options: Any) -> Tensor:
    found = attend(*inputs, **options)
    return torch.cat([found.weights, found.context], dim=-1)


@few
@given(problem=problems(largest=3, temperatures=(1.0, 0.5), rows=1))
def test_gradients_are_the_slopes(problem: Problem) -> None:
    """The operator passes gradcheck in every input, for every scorer and mask."""
    leaves = differentiable(problem)
    options = problem.options

    def run(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None and problem.bias is not None:
            bias = bias.masked_fill(problem.bias == -INF, -INF)
        return weights_and_context(query, keys, values, **(options | {"bias": bias}))

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("score", [scaled_dot, cosine, additive])
@pytest.mark.parametrize("hidden_by", ["mask", "bias"])
def test_a_target_that_sees_nothing_gets_nothing(
    hidden_by: str, score: Scorer, temperature: float, hard: bool
) -> None:
    """A target with all rows hidden has zero weights, zero context and zero gradients."""
    torch.manual_seed(0)
    query, keys = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    values = torch.randn(3, 5, requires_grad=True)
    shown = torch.tensor([[True, True, False], [False, False, False]])
    bias = torch.zeros(2, 3).masked_fill(~shown, -INF)
    hidden: dict[str, Any] = {"visible": shown} if hidden_by == "mask" else {"bias": bias}
    options = {"score": score, "temperature": temperature, **hidden}
    found = attend(query, keys, values, hard=hard, **options)
    assert (found.weights[1] == 0).all()
    assert (found.context[1] == 0).all()
    assert found.weights[0].sum().item() == pytest.approx(1)
    output = found.context.sum() + found.weights.square().sum()
    grads = torch.autograd.grad(output, (query, keys, values), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in grads)
    assert grads[0] is None or (grads[0][1] == 0).all()


# ---------------------------------------------------------------------------- named cases


@given(st.integers(1, 40), st.integers(2, 70), st.integers(1, 20), st.integers(0, 2**16))
@quick
def test_equal_keys_tie_to_the_lowest_row(dim: int, n: int, targets: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(3, 1, dim, generator=generator)
    first = int(torch.randint(n, (1,), generator=generator))
    keys = key.expand(3, n, dim).contiguous()
    query = torch.randn(3, targets, dim, generator=generator)
    visible = torch.arange(n) >= first
    found = attend(query, keys, keys, visible=visible, hard=True)
    assert (found.weights.argmax(-1) == first).all()
    strided = keys.transpose(0, 1).contiguous().transpose(0, 1)  # as a memory keeps its rows
    assert torch.equal(
        attend(query, strided, keys, visible=visible, hard=True).weights, found.weights
    )


@quick
@given(st.integers(1, 7), st.integers(0, 2**16))
def test_equal_products_tie_to_the_lowest_row(dim: int, seed: int) -> None:
    """Unlike keys whose products with the query are the same whole number tie, whatever √d is."""
    rng = np.random.default_rng(seed)
    query, keys = rng.integers(-3, 4, (4, dim)), rng.integers(-3, 4, (30, dim))
    wanted = (query @ keys.T).argmax(1)  # numpy's argmax is the first
    found = attend(
        torch.from_numpy(query).float(), torch.from_numpy(keys).float(), torch.eye(30), hard=True
    )
    assert found.weights.argmax(-1).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: must be finite and greater than 0"),
        ({"temperature": math.nan}, "temperature: must be finite"),
        ({"visible": torch.ones(3)}, "visible: must be bool"),
        ({"values": torch.ones(4, 2)}, "values: 4 rows, keys have 3"),
        ({"keys": torch.ones(3, 5)}, "query: dimension 2, keys have 5"),
        ({"keys": torch.ones(3, 5), "score": cosine}, "query: dimension 2, keys have 5"),
        ({"keys": torch.ones(3, 5), "score": additive}, "query: dimension 2, keys have 5"),
    ],
)
def test_invalid_argument_is_named(change: dict[str, Any], message: str) -> None:
    arguments = {"query": torch.ones(1, 2), "keys": torch.ones(3, 2), "values": torch.ones(3, 2)}
    with pytest.raises(ValueError, match=message):
        attend(**(arguments | change))


# ---------------------------------------------------------------------------- masks


def test_exclude_self_hides_the_targets_own_events() -> None:
    items = torch.tensor([7, 8, 9, 7])
    vectors = torch.eye(3)[torch.tensor([0, 1, 2, 0])] * 5
    targets = torch.tensor([7, 5])
    query = torch.stack([vectors[0], vectors[0]])
    found = attend(query, vectors, vectors, visible=exclude_self(targets, items))
    assert found.weights[0, 0] == found.weights[0, 3] == 0
    assert found.weights[1, 0] > 0.4
    assert torch.allclose(found.weights.sum(-1), torch.ones(2))


def test_zero_vectors_have_cosine_zero() -> None:
    query = torch.zeros(2, 3, requires_grad=True)
    keys = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0]], requires_grad=True)
    scores = cosine(query, keys)
    assert torch.equal(scores, torch.zeros(2, 2))
    grads = torch.autograd.grad(scores.sum(), (query, keys))
    assert torch.equal(grads[0], torch.zeros(2, 3))
    assert grads[1].isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 3e37])
def test_normalize_ignores_the_length(size: float) -> None:
    torch.testing.assert_close(
        normalize(torch.tensor([[3.0, 4.0]]) * size), torch.tensor([[0.6, 0.8]]), atol=1e-6, rtol=0
    )


def test_additive_in_blocks_equals_additive_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs are scored in blocks of rows, to the same result."""
    torch.manual_seed(0)
    query, keys = torch.randn(2, 6, 4), torch.randn(2, 11, 4)
    at_once = additive(query, keys)
    monkeypatch.setattr("models.attention.attend._BLOCK", 2 * 6 * 4 * 3)
    torch.testing.assert_close(additive(query, keys), at_once)


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_cosine_is_the_same_with_and_without_gradients(size: float) -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(2, 5, 8), torch.randn(2, 30, 8)
    keys[0, 3] *= size
    keys[1, 7] *= 0 if size == 1e-30 else size
    before = keys.clone()
    a, b = query.double(), keys.double()
    lengths = a.norm(dim=-1)[..., None] * b.norm(dim=-1)[:, None]
    wanted = ((a @ b.mT) / lengths.clamp(min=1e-300)).float()
    torch.testing.assert_close(cosine(query, keys), wanted, atol=1e-6, rtol=0)
    learning = cosine(query, keys.clone().requires_grad_())
    torch.testing.assert_close(learning.detach(), wanted, atol=1e-6, rtol=0)
    assert torch.equal(keys, before)


# ---------------------------------------------------------------------------- heads


def multi_head(
    module: HeadProjections, query: Tensor, memory: Tensor, visible: Tensor | None = None
) -> Attention:
    """Multi-head attention of queries [T, dim] over rows [n, dim], through all four matrices."""
    found = attend(module.queries(query), *module.keys_values(memory), visible=visible)
    return found._replace(context=module.w_o(merge_heads(found.context)))


def test_heads_split_and_merge() -> None:
    """Each head has neighbouring columns, and merging undoes splitting."""
    x = torch.arange(2 * 3 * 6).view(2, 3, 6)
    split = split_heads(x, 3)
    assert split.shape == (2, 3, 3, 2)
    assert split[1, 2, 0].tolist() == x[1, 0, 4:].tolist()
    assert torch.equal(merge_heads(split), x)
    for heads in (0, 5):
        with pytest.raises(ValueError, match=f"heads: {heads} does not divide the width 6"):
            split_heads(x, heads)


@few
@given(
    heads=st.sampled_from([1, 2, 3]),
    size=st.integers(1, 4),
    rows=st.integers(0, 5),
    tied=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_multi_head_attention_equals_the_loop(
    heads: int, size: int, rows: int, tied: bool, masked: bool, seed: int
) -> None:
    """Each head of any size attends in its own projection and W_O joins them, tied or not."""
    torch.manual_seed(seed)
    module = HeadProjections(6, heads, size, tied=tied).double()
    query, memory = torch.randn(3, 6).double(), torch.randn(rows, 6).double()
    visible = torch.rand(3, rows) < 0.6 if masked else None
    W = {name: p.detach().numpy() for name, p in module.named_parameters()}
    q, k = query.numpy() @ W["w_q.weight"].T, memory.numpy() @ W["w_k.weight"].T
    v = k if tied else memory.numpy() @ W["w_v.weight"].T
    seen = np.ones((3, rows)) if visible is None else visible.numpy()
    each = [
        reference.attend(q_h, k_h, v_h, np.zeros(seen.shape), seen)
        for q_h, k_h, v_h in zip(*(np.split(x, heads, axis=1) for x in (q, k, v)), strict=True)
    ]
    wanted = np.concatenate([context for _, context in each], axis=1) @ W["w_o.weight"].T
    found = multi_head(module, query, memory, visible)
    weights = np.stack([weight for weight, _ in each])
    np.testing.assert_allclose(found.weights.detach(), weights, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.context.detach(), wanted, rtol=1e-9, atol=1e-9)


def test_tied_projections_are_one_matrix() -> None:
    """K = V: the values are the keys, and there is no second matrix to train or to save."""
    module = HeadProjections(8, 2, 4, tied=True)
    memory = torch.randn(3, 8)
    assert torch.equal(*module.keys_values(memory))
    assert set(module.state_dict()) == {"w_q.weight", "w_k.weight", "w_o.weight"}
    separate = HeadProjections(8, 2, 4)
    assert not torch.equal(*separate.keys_values(memory))


# ---------------------------------------------------------------------------- the Jacobian


def test_the_jacobian_is_that_of_the_operator() -> None:
    """Each row of J is the difference quotient of the context in that direction, in float64."""
    generator = torch.Generator().manual_seed(0)
    query, bias = (torch.randn(3, size, generator=generator).double() for size in (4, 9))
    keys, values = (torch.randn(3, 9, size, generator=generator).double() for size in (4, 5))
    bias[1, 2] = -torch.inf
    found = query_jacobian(query, keys, values, bias)
    step = 1e-6
    for direction in range(4):
        ends = []
        for sign in (1, -1):
            moved = query.clone()
            moved[:, direction] += sign * step
            ends.append(attend(moved[:, None], keys, values, bias=bias[:, None]).context[:, 0])
        expected = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close(found[:, direction], expected, atol=1e-8, rtol=1e-6)


def test_without_a_visible_row_the_jacobian_is_zero() -> None:
    """A head whose rows are all hidden, or that has none, changes with no query."""
    hidden = torch.full((2, 3), -torch.inf)
    found = query_jacobian(torch.ones(2, 4), torch.ones(2, 3, 4), torch.ones(2, 3, 5), hidden)
    assert torch.equal(found, torch.zeros(2, 4, 5))
    none = query_jacobian(torch.ones(4), torch.ones(0, 4), torch.ones(0, 5), torch.ones(0))
    assert torch.equal(none, torch.zeros(4, 5))
