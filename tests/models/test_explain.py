"""Contributions add up, and the score without a row is the score with the row deleted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention import attend, logits
from models.explain import contributions, gains, leave_one_out, score_without
from models.heads import MultiHeadAttention, merge_heads, split_heads
from tests.models import reference

quick = settings(max_examples=80, deadline=None, derandomize=True)
INF = math.inf


@st.composite
def heads(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    return scores, values, torch.randn(targets, h, width, generator=generator), scores.double()


def weights_of(scores: Tensor, hard: bool = False) -> Tensor:
    """The loop's weights in float32."""
    flat = [reference.softmax(row, hard=hard) for row in scores.flatten(0, -2).tolist()]
    return torch.tensor(flat, dtype=torch.float64).reshape(scores.shape).float()


@quick
@given(heads())
def test_contributions_sum_to_the_attention_part(drawn: tuple[Tensor, ...]) -> None:
    """Σ_j contribution_j is what W_O makes of the contexts, to 1e-4, and signs survive."""
    scores, values, outputs, _ = drawn
    weights = weights_of(scores)
    found = contributions(weights, gains(values, outputs))
    assert found.shape == (scores.shape[0], scores.shape[2])
    context = torch.einsum("thn,hnv->thv", weights.double(), values.double())
    part = torch.einsum("thv,thv->t", context, outputs.double())
    np.testing.assert_allclose(found.sum(-1).numpy(), part.numpy(), atol=1e-4)
    hidden = (scores == -INF).all(1)
    assert (found[hidden] == 0).all()


@pytest.mark.parametrize("know_logits", [False, True])
@quick
@given(drawn=heads())
def test_leaving_a_row_out_equals_deleting_it(know_logits: bool, drawn: tuple[Tensor, ...]) -> None:
    """For every row of every head, also where that row held nearly everything."""
    scores, values, outputs, exact = drawn
    if not know_logits:  # weights alone remember gaps of up to 80
        scores = scores.clamp(min=(scores.amax(-1, keepdim=True) - 80)).where(scores > -INF, scores)
        exact = scores.double()
    weights = weights_of(scores)
    given_logits = scores if know_logits else None
    found = leave_one_out(weights, values, logits=given_logits)
    total = score_without(weights, gains(values, outputs), logits=given_logits)
    wanted = np.zeros(found.shape)
    for t, h, j in np.ndindex(*scores.shape):
        row = exact[t, h].tolist()
        wanted[t, h, j] = reference.without_row(row, values[h].double().numpy(), j)
    np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5)
    parts = np.einsum("thjv,thv->tj", wanted, outputs.double().numpy())
    np.testing.assert_allclose(total.numpy(), parts, atol=1e-4)


def test_the_closed_form_alone_would_fail_here() -> None:
    """Where one row holds all but 1e-6, dividing differences is noise; the answer is not."""
    scores = torch.tensor([0.0, 15.5, 1.0])
    weights, values = torch.softmax(scores, -1), torch.tensor([[1.0], [-7.3], [2.0]])
    wanted = reference.without_row(scores.tolist(), values.double().numpy(), 1)[0]
    closed = ((weights @ values)[0] - weights[1] * values[1, 0]) / (1 - weights[1])
    assert abs(closed.item() - wanted) > 0.02
    assert leave_one_out(weights, values)[1].item() == pytest.approx(wanted, abs=1e-6)


def test_logits_remember_what_weights_forgot() -> None:
    """A row ahead by 200 leaves no weight to the others; their logits still rank them."""
    scores = torch.tensor([1.0, 200.0, 3.0])
    weights, values = torch.softmax(scores, -1), torch.tensor([[1.0], [5.0], [2.0]])
    assert weights[0] == weights[2] == 0
    wanted = reference.without_row(scores.tolist(), values.double().numpy(), 1)[0]
    found = leave_one_out(weights, values, logits=scores)
    assert found[1].item() == pytest.approx(wanted, abs=1e-6)
    assert found[0].item() == found[2].item() == 5.0


@quick
@given(heads())
def test_without_the_winner_hard_attention_takes_the_next(drawn: tuple[Tensor, ...]) -> None:
    """Deleting a row of a lookup changes the answer only where that row was the answer."""
    scores, values, _, exact = drawn
    weights = weights_of(scores, hard=True)
    found = leave_one_out(weights, values, logits=scores, hard=True)
    for t, h, j in np.ndindex(*scores.shape):
        table = values[h].double().numpy()
        wanted = reference.without_row(exact[t, h].tolist(), table, j, hard=True)
        assert np.array_equal(found[t, h, j].numpy(), wanted.astype(np.float32))
    with pytest.raises(ValueError, match="logits: hard attention keeps no trace"):
        leave_one_out(weights, values, hard=True)


@pytest.mark.parametrize("ahead", [0.0, 30.0])
def test_only_the_rows_asked_for_are_computed(ahead: float) -> None:
    """A subset of rows gets what those rows get among all."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 9, generator=generator)
    scores[:, 4] += ahead
    weights, values = torch.softmax(scores, -1), torch.randn(2, 9, 3, generator=generator)
    rows = torch.tensor([7, 4, 0])
    every = leave_one_out(weights, values)
    assert torch.equal(leave_one_out(weights, values, rows=rows), every[:, rows])
    gain = values[..., 0]
    part = score_without(weights, gain, rows=rows)
    assert torch.equal(part, score_without(weights, gain)[rows])


def test_the_only_row_leaves_nothing_behind() -> None:
    """Without the one visible row there is no attention part, not NaN."""
    weights, values = torch.tensor([0.0, 1.0, 0.0]), torch.ones(3, 2)
    assert torch.equal(
        leave_one_out(weights, values), torch.tensor([[1.0] * 2, [0.0] * 2, [1.0] * 2])
    )
    assert torch.equal(leave_one_out(torch.zeros(3), values), torch.zeros(3, 2))


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
        # Deleting an event really, and attending again with every head.
        without = score_without(output.weights.transpose(0, 1), gain.transpose(0, 1))
        for j in range(9):
            rest = torch.cat([history[:j], history[j + 1 :]])
            again = (target * module(target, rest).context).sum(-1)
            assert torch.allclose(without[:, j], again, atol=1e-4)
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
    without = leave_one_out(found.weights, v, logits=logits(query, k))
    assert torch.allclose(without[0, 0], v[1])
