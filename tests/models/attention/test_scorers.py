"""Named cases of the scorers; tests/models/attention/test_attend.py compares them with loops."""

import pytest
import torch

from models.attention.attend import additive, cosine, normalize


def test_zero_vectors_have_cosine_zero() -> None:
    """Neither the score nor its gradient is NaN, and the gradient of a zero vector is zero."""
    query = torch.zeros(2, 3, requires_grad=True)
    keys = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0]], requires_grad=True)
    scores = cosine(query, keys)
    assert torch.equal(scores, torch.zeros(2, 2))
    grads = torch.autograd.grad(scores.sum(), (query, keys))
    assert torch.equal(grads[0], torch.zeros(2, 3))
    assert grads[1].isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 3e37])
def test_normalize_ignores_the_length(size: float) -> None:
    """Normalisation is accurate for lengths whose squares overflow or underflow float32."""
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
    """Cosine equals float64 with and without gradients, for any key length, and changes no key."""
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
