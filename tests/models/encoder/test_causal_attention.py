"""Causal attention and its hand-written gradient, compared with float64 formulas."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from models.encoder.causal_attention import FUTURE_BUCKET, causal_attention
from models.encoder.event_bias import BUCKETS
from tests.support import reference

HEADS, SIZE, WIDTH = 3, 4, 5  # queries and keys have SIZE dimensions, values WIDTH
EDGES = [1, 2, 63, 64, 65, 200]  # queries are taken 64 at once


def drawn(seed: int, batch: int, length: int, hidden: float = 0.0) -> tuple[list[Tensor], Tensor]:
    """Draw queries, keys, values [H, B, L, ·], biases of buckets [H, BUCKETS], and buckets.

    With a share `hidden` also biases of rows [H, B, L], of which about that share is -inf.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (HEADS, batch, length)
    parts = [torch.randn(*shape, width, generator=generator) for width in (SIZE, SIZE, WIDTH)]
    parts.append(2 * torch.randn(HEADS, BUCKETS, generator=generator))
    if hidden:
        hide = torch.rand(shape, generator=generator) < hidden
        hide[0] = hide[0, :, :1]  # every row of a history, or none
        hide[1, :, :3] = True  # the first rows
        parts.append(torch.randn(shape, generator=generator).masked_fill(hide, -math.inf))
    few = torch.randint(0, BUCKETS, (40,), generator=generator)  # so that all come again
    bucket = few[torch.randint(0, 40, (batch, length, length), generator=generator)]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return parts, bucket.masked_fill(future, FUTURE_BUCKET).int()


def causal(parts: Sequence[Tensor], bucket: Tensor) -> Tensor:
    query, key, value, table, *row_bias = parts
    return causal_attention(query, key, value, table, bucket, *row_bias)


def plain(parts: Sequence[Tensor], bucket: Tensor) -> Tensor:
    """The formula as it is written, over the whole square, for autograd."""
    query, key, value, table, *row_bias = parts
    scores = query @ key.mT / math.sqrt(SIZE) + table[:, bucket.clamp(max=BUCKETS - 1).long()]
    hidden = (bucket == FUTURE_BUCKET).expand(scores.shape)
    if row_bias:
        scores = scores + row_bias[0].clamp(min=-1e4)[..., None, :]
        hidden = hidden | (row_bias[0] == -math.inf)[..., None, :]
    weights = torch.softmax(scores.masked_fill(hidden, -1e9), -1)
    return weights.masked_fill(hidden, 0.0) @ value


@pytest.mark.parametrize("hidden", [0.0, 0.4])
@pytest.mark.parametrize("length", EDGES)
def test_causal_attention_equals_the_loop(length: int, hidden: float) -> None:
    """Each query's context equals the float64 loop over its own and earlier visible keys."""
    parts, bucket = drawn(length, 2, length, hidden)
    got = causal(parts, bucket)
    assert got.shape == (HEADS, 2, length, WIDTH)
    query, key, value, table, *row_bias = (part.double().numpy() for part in parts)
    for head, row, place in np.ndindex(HEADS, 2, length):
        seen = slice(place + 1)
        bias = table[head, bucket[row, place, seen].numpy()][None]
        if row_bias:
            bias = bias + row_bias[0][head, row, seen]
        _, context = reference.attend(
            query[head, row, place : place + 1],
            key[head, row, seen],
            value[head, row, seen],
            bias,
            np.ones(bias.shape, dtype=np.bool_),
        )
        np.testing.assert_allclose(got[head, row, place], context[0], atol=1e-5)


@pytest.mark.parametrize("hidden", [0.0, 0.4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", EDGES)
def test_every_gradient_is_that_of_the_formula(length: int, batch: int, hidden: float) -> None:
    """Gradients equal those of autograd over the float64 formula, also where rows are hidden."""
    parts, bucket = drawn(length + batch, batch, length, hidden)
    weight = torch.randn(parts[2].shape, generator=torch.Generator().manual_seed(1))
    mine = [part.clone().requires_grad_() for part in parts]
    (causal(mine, bucket) * weight).sum().backward()  # type: ignore[no-untyped-call]
    wide = [part.double().requires_grad_() for part in parts]
    (plain(wide, bucket) * weight).sum().backward()  # type: ignore[no-untyped-call]
    for part, expected in zip(mine, wide, strict=True):
        assert part.grad is not None
        assert expected.grad is not None
        assert part.grad.dtype == torch.float32
        assert part.grad.shape == part.shape
        np.testing.assert_allclose(part.grad, expected.grad, atol=2e-5, rtol=1e-5)


def test_scores_of_any_size_are_numbers() -> None:
    """Large scores and biases do not overflow, forward or backward."""
    parts, bucket = drawn(4, 2, 66)
    mine = [(60 * part).requires_grad_() for part in parts]
    out = causal(mine, bucket)
    wide = [part.detach().double().requires_grad_() for part in mine]
    np.testing.assert_allclose(out.detach(), plain(wide, bucket).detach(), atol=1e-2)
    out.sum().backward()  # type: ignore[no-untyped-call]
    for part in mine:
        assert part.grad is not None
        assert torch.isfinite(part.grad).all()


def test_narrow_products_stay_near() -> None:
    """In bfloat16 results and gradients have its dtype and its precision; biases stay float32."""
    parts, bucket = drawn(5, 2, 80)
    weight = torch.randn(parts[2].shape, generator=torch.Generator().manual_seed(1))
    mine = [part.bfloat16().requires_grad_() for part in parts[:3]]
    mine.append(parts[3].clone().requires_grad_())
    out = causal(mine, bucket)
    assert out.dtype == torch.bfloat16
    (out.float() * weight).sum().backward()  # type: ignore[no-untyped-call]
    wide = [part.detach().double().requires_grad_() for part in mine]
    expected = plain(wide, bucket)
    (expected * weight).sum().backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(out.detach().float(), expected.detach(), atol=0.03)
    for part, other in zip(mine, wide, strict=True):
        assert part.grad is not None
        assert other.grad is not None
        assert part.grad.dtype == part.dtype
        error = (part.grad.double() - other.grad).norm() / other.grad.norm()
        assert float(error) < 0.02
