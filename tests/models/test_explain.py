"""Contributions add up, and weights alone explain nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention import attend
from models.explain import contributions, gains
from models.heads import MultiHeadAttention, merge_heads, split_heads
from tests.models import reference

quick = settings(max_examples=80, deadline=None, derandomize=True)
INF = math.inf


@st.composite
def heads(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, H, n], values [H, n, V], outputs [T, H, V]; diffuse, or one row holding all."""
    targets, h = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n, width = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0, 20.0]))
    scores = scale * torch.randn(targets, h, n, generator=generator)
    ahead = draw(st.sampled_from([0.0, 0.0, 8.0, 16.0, 25.0, 60.0]))
    scores[..., draw(st.integers(0, n - 1))] += ahead
    if draw(st.booleans()):
        scores[torch.rand(scores.shape, generator=generator) < 0.4] = -INF
    values = torch.randn(h, n, width, generator=generator)
    return scores, values, torch.randn(targets, h, width, generator=generator)


def weights_of(scores: Tensor) -> Tensor:
    """The loop's weights in float32."""
    flat = [reference.softmax(row) for row in scores.flatten(0, -2).tolist()]
    return torch.tensor(flat, dtype=torch.float64).reshape(scores.shape).float()


@quick
@given(heads())
def test_contributions_sum_to_the_attention_part(drawn: tuple[Tensor, ...]) -> None:
    """Σ_j contribution_j is what W_O makes of the contexts, to 1e-4, and signs survive."""
    scores, values, outputs = drawn
    weights = weights_of(scores)
    found = contributions(weights, gains(values, outputs))
    assert found.shape == (scores.shape[0], scores.shape[2])
    context = torch.einsum("thn,hnv->thv", weights.double(), values.double())
    part = torch.einsum("thv,thv->t", context, outputs.double())
    np.testing.assert_allclose(found.sum(-1).numpy(), part.numpy(), atol=1e-4)
    hidden = (scores == -INF).all(1)
    assert (found[hidden] == 0).all()


def test_explaining_a_whole_module_adds_up() -> None:
    """Through projections and W_O: ⟨target, output⟩ is the sum of signed contributions."""
    torch.manual_seed(0)
    module = MultiHeadAttention(12, 3)
    target, history = torch.randn(4, 12), torch.randn(9, 12)
    with torch.inference_mode():
        output = module(target, history)
        outward = split_heads(target @ module.w_o.weight, 3)  # o^h of each target (H, T, d)
        values = module.values(history)  # (H, n, d)
        gain = outward @ values.mT  # (H, T, n)
        found = contributions(output.weights.transpose(0, 1), gain.transpose(0, 1))
        score = (target * output.context).sum(-1)
        assert torch.allclose(found.sum(-1), score, atol=1e-4)
        assert (found < 0).any()
        assert merge_heads(outward).shape == (4, 12)


def test_a_large_weight_on_a_value_that_does_not_matter_explains_nothing() -> None:
    """Weights say where attention went; contributions say what it brought."""
    keys: dict[str, Any] = {"a": [3.0, 0.0], "b": [1.0, 0.0]}
    k = torch.tensor(list(keys.values()))
    v = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    query, outward = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    found = attend(query, k, v)
    part = contributions(found.weights, gains(v, outward)[0][None])
    assert found.weights[0, 0] > 0.9
    assert part[0] == 0
    assert part[1] == found.weights[0, 1]
