"""Pooled dropout: rate, independence, seeding, gradients and dtype."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import models.encoder.history_encoder
from models.encoder.history_encoder import PooledDropout


def training(rate: float) -> PooledDropout:
    drop = PooledDropout(rate)
    drop.train()
    return drop


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.8])
def test_it_drops_its_share_and_keeps_the_mean(rate: float) -> None:
    """Entries are 0 or scaled by 1 / (1 - rate), with the given rate and an unchanged mean."""
    torch.manual_seed(0)
    drop, ones = training(rate), torch.ones(300, 1000)
    out = drop(ones)
    assert out.shape == ones.shape
    kept = out[out != 0]
    np.testing.assert_allclose(kept, 1 / (1 - rate), rtol=1e-6)
    error = (rate * (1 - rate) / ones.numel()) ** 0.5
    assert float((out == 0).float().mean()) == pytest.approx(rate, abs=5 * error)
    assert float(out.mean()) == pytest.approx(1, abs=5 * error / (1 - rate))


def test_entries_are_dropped_one_by_one() -> None:
    """Entries are dropped independently within and between calls."""
    torch.manual_seed(1)
    drop, ones = training(0.5), torch.ones(200, 300)
    masks = [(drop(ones) != 0).float() for _ in range(8)]
    for mask in masks:
        assert float(mask.mean(0).std()) < 0.06  # 0.035 for independent entries
        assert float(mask.mean(1).std()) < 0.06  # 0.029
    for one, other in pairwise(masks):
        assert float((one == other).float().mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_outside_training_nothing_is_dropped(rate: float) -> None:
    """In eval mode, or at rate 0, the tensor is returned and no random number is drawn."""
    drop, x = PooledDropout(rate), torch.randn(5, 7)
    if rate:
        drop.eval()
    before = torch.get_rng_state()
    assert drop(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_decides() -> None:
    """The same seed drops the same entries, call by call; another seed others."""
    x = torch.ones(50, 60)

    def dropped(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        drop = training(0.4)
        return [drop(x) for _ in range(3)]

    for one, again, other in zip(dropped(1), dropped(1), dropped(2), strict=True):
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 100, 128, 200])
def test_tensors_larger_than_the_pool(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than the pool repeat it, with the same share dropped."""
    monkeypatch.setattr(models.encoder.history_encoder, "_POOL", 64)
    torch.manual_seed(size)
    drop, dropped = training(0.25), 0.0
    for _ in range(50):
        out = drop(torch.full((size, 3), 2.0))
        assert out.shape == (size, 3)
        values = {round(value, 5) for value in out.unique().tolist()}
        assert values <= {0.0, round(2 / 0.75, 5)}
        flat = out.flatten()
        assert torch.equal(flat[64:], flat[:-64])  # the same entries, a pool later
        dropped += float((out == 0).float().mean()) / 50
    pool = drop._pool
    assert pool is not None
    assert dropped == pytest.approx(float((pool == 0).float().mean()), abs=0.1)


@pytest.mark.parametrize("size", [40, 64, 100])
def test_masks_begin_anywhere_in_the_pool(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mask is the pool read cyclically from a random place, and every place occurs."""
    monkeypatch.setattr(models.encoder.history_encoder, "_POOL", 64)
    torch.manual_seed(5)
    drop, ones = training(0.5), torch.ones(size)
    masks = [drop(ones) for _ in range(800)]
    assert drop._pool is not None
    pool = torch.cat([drop._pool] * 3).tolist()
    places = {tuple(pool[start : start + size]) for start in range(64)}
    assert len(places) == 64
    assert {tuple(mask.tolist()) for mask in masks} == places


def test_a_pool_can_be_drawn_again() -> None:
    """After `redraw` the masks are those of a new module under the same generator."""
    x = torch.ones(30, 40)
    drop = training(0.5)
    drop(x)
    drop.redraw()
    torch.manual_seed(3)
    again = drop(x)
    torch.manual_seed(3)
    assert torch.equal(again, training(0.5)(x))


def test_the_gradient_is_dropped_with_its_entry() -> None:
    """The gradient is 0 where the entry was dropped, else scaled as the entry."""
    torch.manual_seed(4)
    x = torch.randn(20, 30, requires_grad=True)
    out = training(0.3)(x)
    out.sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(out.detach(), x.detach() * x.grad, atol=1e-6)
    assert set((x.grad == 0).flatten().tolist()) == {True, False}


def test_the_dtype_stays() -> None:
    """The output has the dtype of the input."""
    assert training(0.5)(torch.ones(4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_masks_are_no_weights() -> None:
    """The pool is not part of the state dict."""
    drop = training(0.5)
    drop(torch.ones(3))
    assert dict(drop.state_dict()) == {}
