"""Key-value memory and multi-head projections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention.attend import Attention, attend
from models.attention.kv_memory import HeadProjections, KeyValueMemory, merge_heads, split_heads
from tests.support import reference


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keys": torch.zeros(3, 4)}, r"keys: must be \[n, heads, d\], got \[3, 4\]"),
        ({"keys": torch.zeros(3, 2, 4).int()}, "keys: must be floating point"),
        ({"values": torch.zeros(2, 2, 4)}, r"values: \[n, heads\] is \[2, 2\]"),
        ({"values": torch.zeros(3, 2, 4).double()}, "values: torch.float64, keys are"),
        ({"bias": torch.zeros(2)}, r"bias: must be \[3\] or \[2, 3\], got \[2\]"),
        ({"bias": torch.zeros(3).double()}, "bias: torch.float64, keys are"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    """Errors say which field was wrong, and how."""
    good = {"keys": torch.zeros(3, 2, 4), "values": torch.zeros(3, 2, 1)}
    with pytest.raises(ValueError, match=message):
        KeyValueMemory(**(good | fields))


few = settings(max_examples=40, deadline=None, derandomize=True)


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
