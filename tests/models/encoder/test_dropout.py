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


@pytest.mark.parametrize("size", [40, 64, 100])
def test_masks_begin_anywhere_in_the_pool(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.encoder.history_encoder, "_POOL", 64)
    torch.manual_seed(5)
    drop, ones = training(0.5), torch.ones(size)
    masks = [drop(ones) for _ in range(800)]
    assert drop._pool is not None
    pool = torch.cat([drop._pool] * 3).tolist()
    places = {tuple(pool[start : start + size]) for start in range(64)}
    assert len(places) == 64
    assert {tuple(mask.tolist()) for mask in masks} == places
