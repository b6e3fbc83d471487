"""The history encoder: equal to a float64 loop, and blind to the future."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.encoder import HistoryEncoder
from models.recommender import Recommender
from tests.models.reference_model import ReferenceModel
from tests.models.small import DAY, SECOND, random_model

DIM = 12


@pytest.fixture(scope="module")
def model() -> Recommender:
    return random_model(3)


@pytest.fixture(scope="module")
def encoder(model: Recommender) -> HistoryEncoder:
    assert model.encoder is not None
    return model.encoder


def events(seed: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Vectors [B, L, dim] and rising times [B, L], some of them equal."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.choice([0, 1, 40 * SECOND, DAY], (batch, length)), axis=1)
    vectors = rng.normal(size=(batch, length, DIM)).astype(np.float32)
    return torch.from_numpy(vectors), torch.from_numpy(times)


def run(encoder: HistoryEncoder, vectors: Tensor, times: Tensor) -> Tensor:
    with torch.inference_mode():
        summary: Tensor = encoder(vectors, times)
    return summary


@pytest.mark.parametrize("length", [1, 2, 20])
def test_summaries_equal_the_loop(model: Recommender, encoder: HistoryEncoder, length: int) -> None:
    """Every prefix of every history of a batch, against plain loops over the weights."""
    vectors, times = events(length, 2, length)
    got = run(encoder, vectors, times)
    reference = ReferenceModel(model, heads=3)
    for row in range(2):
        expected = reference.summaries(list(vectors[row].double().numpy()), times[row].tolist())
        np.testing.assert_allclose(got[row], np.stack(expected), atol=2e-5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(length=st.integers(2, 12), seed=st.integers(0, 1000), data=st.data())
def test_a_later_event_never_changes_an_earlier_summary(
    encoder: HistoryEncoder, length: int, seed: int, data: st.DataObject
) -> None:
    """Other items at other times from some place on: what stands before it stays as it was."""
    place = data.draw(st.integers(1, length - 1))
    vectors, times = events(seed, 1, length)
    other, later = events(seed + 1, 1, length)
    before = run(encoder, vectors, times)
    changed = torch.cat([vectors[:, :place], 9 * other[:, place:]], 1)
    moved = torch.cat([times[:, :place], times[:, place - 1 : place] + later[:, place:]], 1)
    after = run(encoder, changed, moved)
    np.testing.assert_allclose(after[:, :place], before[:, :place], atol=1e-6)
    assert not np.allclose(after[:, place:], before[:, place:], atol=1e-3)


def test_the_future_gets_no_gradient(encoder: HistoryEncoder) -> None:
    """Exactly none: the summary at t does not depend on any event after t, nor on padding."""
    vectors, times = events(5, 1, 6)
    vectors.requires_grad_()
    encoder(vectors, times)[0, 2].sum().backward()
    assert vectors.grad is not None
    assert vectors.grad[0, :3].abs().sum(-1).gt(0).all()
    assert (vectors.grad[0, 3:] == 0).all()


def test_appending_leaves_earlier_summaries(encoder: HistoryEncoder) -> None:
    """A history that grows by one event at a time, as a service sees it."""
    vectors, times = events(7, 1, 10)
    whole = run(encoder, vectors, times)
    for length in range(1, 11):
        grown = run(encoder, vectors[:, :length], times[:, :length])
        np.testing.assert_allclose(grown, whole[:, :length], atol=1e-6)


def test_padding_has_no_effect(encoder: HistoryEncoder) -> None:
    """Short histories beside a long one, filled up with anything at any time."""
    vectors, times = events(8, 3, 9)
    lengths = [9, 4, 1]
    for row, length in enumerate(lengths):
        vectors[row, length:] = 1e3
        times[row, length:] = -(2**40)
    together = run(encoder, vectors, times)
    for row, length in enumerate(lengths):
        alone = run(encoder, vectors[row : row + 1, :length], times[row : row + 1, :length])
        np.testing.assert_allclose(together[row, :length], alone[0], atol=1e-6)


def test_only_gaps_of_time_count(encoder: HistoryEncoder) -> None:
    """The same history a thousand days later has the same summaries; a stretched one has not."""
    vectors, times = events(9, 1, 8)
    first = run(encoder, vectors, times)
    np.testing.assert_array_equal(run(encoder, vectors, times + 1000 * DAY), first)
    assert not np.allclose(run(encoder, vectors, times * 50), first, atol=1e-3)


def test_a_clock_that_ran_backwards_is_no_gap(encoder: HistoryEncoder) -> None:
    """Times that fall count as equal ones."""
    vectors, times = events(10, 1, 5)
    falling = torch.arange(0, -5 * DAY, -DAY)[None]
    same = torch.zeros_like(times)
    np.testing.assert_array_equal(run(encoder, vectors, falling), run(encoder, vectors, same))


def test_order_counts(encoder: HistoryEncoder) -> None:
    """The same events the other way round are another history."""
    vectors, _ = events(11, 1, 5)
    times = torch.zeros(1, 5, dtype=torch.int64)
    ahead, back = (run(encoder, v, times)[:, -1] for v in (vectors, vectors.flip(1)))
    assert not np.allclose(ahead, back, atol=1e-3)
