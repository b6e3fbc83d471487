"""Chunked cross-entropy: its loss and its gradients against autograd of the float64 formula."""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.training.losses import Chunk, chunked_cross_entropy

WIDTH = 5


class Case(NamedTuple):
    """Arguments of the loss for a number of rows."""

    states: Tensor  # [T, d]
    scale: Tensor  # [T, 2]
    classes: Tensor  # [C, d]
    bias: Tensor  # [C]
    targets: Tensor  # [T]
    worth: Tensor  # [T]
    hidden: Tensor  # bool [T, C]
    counts: Tensor | None  # [2, T, C]

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.states, self.scale, self.classes, self.bias

    def chunks(self, edges: list[int]) -> list[Chunk]:
        """The rows between these edges, as the loss takes them."""
        return [
            Chunk(first, last, self.hidden[first:last].flatten().nonzero().flatten(),
                  None if self.counts is None else self.counts[:, first:last].clone().unbind)
            for first, last in pairwise(edges)
        ]  # fmt: skip


def drawn(seed: int, rows: int, width: int, *, counted: bool = True) -> Case:
    """Draw a case with rows of zero weight, and with hidden places, targets among them."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    worth = torch.from_numpy(rng.choice([0.0, 1.0, 1.0, 2.5], rows).astype(np.float32))
    worth[rng.integers(0, rows)] = 1.0
    counts = torch.from_numpy(rng.poisson(0.4, (2, rows, width)).astype(np.float32)).log1p()
    return Case(
        normal(rows, WIDTH),
        normal(rows, 2),
        normal(width, WIDTH),
        normal(width),
        torch.from_numpy(rng.integers(0, width, rows)),
        worth,
        torch.from_numpy(rng.random((rows, width)) < 0.3),
        counts if counted else None,
    )


def formula(case: Case) -> tuple[float, list[Tensor]]:
    """The loss as it is written, hidden classes left out of the sum, with autograd's gradients."""
    states, scale, classes, bias = (part.double().requires_grad_() for part in case.weights)
    logits = states @ classes.T + bias
    if case.counts is not None:
        logits = logits + scale[:, :1] * case.counts[0] + scale[:, 1:] * case.counts[1]
    hidden = case.hidden.clone()
    hidden[torch.arange(len(states)), case.targets] = False
    logits = logits.masked_fill(hidden, -math.inf)
    own = logits[torch.arange(len(states)), case.targets]
    loss = ((torch.logsumexp(logits, 1) - own) * case.worth).sum() / case.worth.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    parts = (states, scale, classes, bias)
    return float(loss.detach()), [
        torch.zeros_like(part) if part.grad is None else part.grad for part in parts
    ]


def run(
    case: Case, edges: list[int], dtype: torch.dtype = torch.float32
) -> tuple[float, list[Tensor]]:
    mine = [part.clone().requires_grad_() for part in case.weights]
    loss = chunked_cross_entropy(
        *mine,
        targets=case.targets,
        target_weights=case.worth,
        chunks=iter(case.chunks(edges)),
        dtype=dtype,
    )
    (3 * loss).backward()  # type: ignore[no-untyped-call]
    gradients = []
    for weight in mine:
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        gradients.append(weight.grad / 3)
    return float(loss.detach()), gradients


def edges(rows: int, step: int) -> list[int]:
    return [*range(0, rows, step), rows]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 12),
    width=st.integers(1, 9),
    step=st.integers(1, 12),
    counted=st.booleans(),
)
def test_loss_and_gradients_are_those_of_the_formula(
    seed: int, rows: int, width: int, step: int, counted: bool
) -> None:
    case = drawn(seed, rows, width, counted=counted)
    loss, gradients = run(case, edges(rows, step))
    expected, wanted = formula(case)
    assert loss == pytest.approx(expected, abs=1e-5)
    for mine, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_rows_that_all_weigh_zero_have_no_loss() -> None:
    case = drawn(8, 5, 4)._replace(worth=torch.zeros(5))
    loss, gradients = run(case, [0, 5])
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_large_logits_are_numbers() -> None:
    """Logits of many thousands neither overflow nor lose the loss."""
    case = drawn(9, 8, 6)
    case = case._replace(states=3_000 * case.states)
    loss, gradients = run(case, edges(8, 3))
    expected, wanted = formula(case)
    assert loss == pytest.approx(expected, rel=1e-5)
    for mine, other in zip(gradients[:1], wanted[:1], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_narrow_products_stay_near() -> None:
    """In bfloat16 the loss and the gradients keep its precision, and are float32."""
    case = drawn(10, 60, 50)
    loss, gradients = run(case, edges(60, 16), torch.bfloat16)
    expected, wanted = formula(case)
    assert loss == pytest.approx(expected, rel=0.01)
    for mine, other in zip(gradients, wanted, strict=True):
        assert float((mine - other).norm() / other.norm()) < 0.02
