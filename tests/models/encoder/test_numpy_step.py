"""One event at a time in numpy, against the encoder's whole windows in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.encoder.history_encoder import EncoderCache, HistoryEncoder, NumpyEncoder
from tests.support.small import DAY, SECOND


def encoder_of(blocks: int, heads: int, dim: int) -> HistoryEncoder:
    """An encoder in which every weight is random."""
    torch.manual_seed(blocks)
    encoder = HistoryEncoder(dim, heads, blocks, 0.3).eval().requires_grad_(False)
    for weight in encoder.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return encoder


def stepped(encoder: HistoryEncoder, events: torch.Tensor, times: torch.Tensor) -> EncoderCache:
    stepper, cache = NumpyEncoder(encoder), encoder.empty_cache()
    for event, time in zip(events, times.tolist(), strict=True):
        cache = stepper.append(cache, event, time)
    return cache


@pytest.mark.parametrize(("blocks", "heads", "dim"), [(1, 1, 4), (2, 4, 16), (3, 2, 24)])
def test_numpy_steps_equal_the_full_window(blocks: int, heads: int, dim: int) -> None:
    encoder = encoder_of(blocks, heads, dim)
    rng = np.random.default_rng(blocks)
    events = torch.from_numpy(rng.normal(size=(40, dim)).astype(np.float32))
    waits = rng.choice([0, SECOND, 50 * SECOND, DAY, 90 * DAY, -DAY], 40)
    times = torch.from_numpy(np.cumsum(waits))
    cache = stepped(encoder, events, times)
    whole = encoder.append(encoder.empty_cache(), events, times)
    for name in ("keys", "values", "timestamps", "states"):
        np.testing.assert_allclose(
            getattr(cache, name), getattr(whole, name), atol=1e-4, err_msg=name
        )
    states = encoder(events[None], times[None])[0]
    np.testing.assert_allclose(cache.states, states, atol=1e-4)


def test_positions_have_no_end() -> None:
    """A step is correct beyond the precomputed distances."""
    encoder = encoder_of(2, 1, 4)
    events = torch.randn(4_100, 4, generator=torch.Generator().manual_seed(0))
    times = torch.arange(4_100) * SECOND
    before = encoder.append(encoder.empty_cache(), events[:-1], times[:-1])
    cache = NumpyEncoder(encoder).append(before, events[-1], int(times[-1]))
    whole = encoder.append(before, events[-1:], times[-1:])
    np.testing.assert_allclose(cache.states, whole.states, atol=1e-4)


def test_step_does_not_modify_the_previous_cache() -> None:
    encoder = encoder_of(2, 2, 8)
    events, times = torch.randn(5, 8), torch.arange(5) * SECOND
    before = stepped(encoder, events[:4], times[:4])
    copies = [part.clone() for part in before]
    NumpyEncoder(encoder).append(before, events[4], int(times[4]))
    assert all(torch.equal(part, copy) for part, copy in zip(before, copies, strict=True))
    assert len(before) == 4
