"""Heads and their projections, against a loop over each head."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention.attend import Attention, causal
from models.attention.multihead import MultiHeadAttention, merge_heads, split_heads
from models.attention.scorers import Additive, Scorer, cosine, scaled_dot
from tests.support import reference

few = settings(max_examples=40, deadline=None, derandomize=True)


def test_splitting_and_merging_heads_are_inverse() -> None:
    """Heads come out of the width and go back into it."""
    x = torch.randn(2, 5, 12)
    split = split_heads(x, 3)
    assert split.shape == (2, 3, 5, 4)
    assert torch.equal(split[:, 1], x[..., 4:8])
    assert torch.equal(merge_heads(split), x)
    with pytest.raises(ValueError, match="heads: 5 does not divide the width 12"):
        split_heads(x, 5)


@st.composite
def modules(draw: st.DrawFn) -> tuple[MultiHeadAttention, Tensor, Tensor, Tensor | None, str]:
    heads, key_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tied = draw(st.booleans())
    value_dim = key_dim if tied else draw(st.integers(1, 4))
    form = draw(st.sampled_from(["scaled_dot", "cosine", "additive"]))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    scores: dict[str, Scorer] = {"scaled_dot": scaled_dot, "cosine": cosine}
    score = scores.get(form) or Additive(key_dim, key_dim, 4)
    module = MultiHeadAttention(
        6,
        heads,
        memory_dim=5,
        key_dim=key_dim,
        value_dim=value_dim,
        out_dim=4,
        tied=tied,
        score=score,
    ).double()
    query, memory = torch.randn(3, 6).double(), torch.randn(draw(st.integers(0, 5)), 5).double()
    visible = torch.rand(3, len(memory)) < 0.6 if draw(st.booleans()) else None
    return module, query, memory, visible, form


@few
@given(modules())
def test_multi_head_attention_equals_the_loop(
    drawn: tuple[MultiHeadAttention, Tensor, Tensor, Tensor | None, str],
) -> None:
    """Each head attends in its own projection and W_O joins them, tied or not."""
    module, query, memory, visible, form = drawn
    W = {name: p.detach().numpy() for name, p in module.named_parameters()}
    if form == "additive":
        score = reference.additive(
            W["score.query.weight"], W["score.key.weight"], W["score.weight"]
        )
    else:
        score = {"scaled_dot": reference.scaled_dot, "cosine": reference.cosine}[form]
    q, k = query.numpy() @ W["w_q.weight"].T, memory.numpy() @ W["w_k.weight"].T
    v = k if module.tied else memory.numpy() @ W["w_v.weight"].T
    seen = np.ones((3, len(memory))) if visible is None else visible.numpy()
    contexts = []
    weights = []
    for h in range(module.heads):
        q_h, k_h, v_h = (np.split(x, module.heads, axis=1)[h] for x in (q, k, v))
        w, c = reference.attend(q_h, k_h, v_h, np.zeros(seen.shape), seen, score=score)
        weights.append(w)
        contexts.append(c)
    wanted = np.concatenate(contexts, axis=1) @ W["w_o.weight"].T
    found: Attention = module(query, memory, visible=visible)
    np.testing.assert_allclose(found.weights.detach(), np.stack(weights), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.context.detach(), wanted, rtol=1e-9, atol=1e-9)


def test_tied_projections_are_one_matrix() -> None:
    """K = V: the values are the keys, and there is no second matrix to train or to save."""
    module = MultiHeadAttention(8, 2, tied=True)
    memory = torch.randn(3, 8)
    assert torch.equal(module.keys(memory), module.values(memory))
    assert set(module.state_dict()) == {"w_q.weight", "w_k.weight", "w_o.weight"}
    separate = MultiHeadAttention(8, 2)
    assert not torch.equal(separate.keys(memory), separate.values(memory))
    with pytest.raises(ValueError, match="tied needs value_dim = key_dim"):
        MultiHeadAttention(8, 2, value_dim=3, tied=True)


def test_causal_self_attention_never_looks_ahead() -> None:
    """Changing a later row leaves every earlier output bit for bit."""
    torch.manual_seed(0)
    module = MultiHeadAttention(8, 2)
    x = torch.randn(6, 8)
    changed = x.clone()
    changed[4:] += 1
    before = module(x, x, visible=causal(6)).context
    after = module(changed, changed, visible=causal(6)).context
    assert torch.equal(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])


def test_projections_are_trained() -> None:
    """Gradients reach all four matrices, and a few steps fit a lookup that starts unknown."""
    torch.manual_seed(0)
    module = MultiHeadAttention(6, 2, key_dim=6)
    keys = torch.randn(5, 6)
    target = keys[torch.tensor([1, 2, 3, 4, 0])]  # each row asks for the next
    optimiser = torch.optim.Adam(module.parameters(), lr=0.03)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = (module(keys, keys).context - target).square().mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5
