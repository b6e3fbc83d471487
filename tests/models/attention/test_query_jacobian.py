"""The Jacobian of attention by the query, against finite differences of the operator."""

import torch

from models.attention.attend import attend
from models.attention.partial_softmax import query_jacobian


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
