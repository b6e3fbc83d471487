"""The history encoder compared with a float64 loop: causality, padding, times and caching."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.encoder.history_encoder import NO_REQUEST_TIME, EncoderCache, HistoryEncoder
from models.recommender.recommender import Recommender
from tests.support.reference_model import ReferenceModel
from tests.support.small import DAY, SECOND, random_model

DIM = 12


@pytest.fixture(scope="module")
def model() -> Recommender:
    return random_model(3)


@pytest.fixture(scope="module")
def encoder(model: Recommender) -> HistoryEncoder:
    return encoder_of(model)


def encoder_of(model: Recommender) -> HistoryEncoder:
    assert model.encoder is not None
    return model.encoder


def events(seed: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Vectors [B, L, dim] and rising times [B, L], some of them equal."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.choice([0, 1, 40 * SECOND, DAY], (batch, length)), axis=1)
    vectors = rng.normal(size=(batch, length, DIM)).astype(np.float32)
    return torch.from_numpy(vectors), torch.from_numpy(times)


def requests(seed: int, times: Tensor, told: float) -> Tensor:
    """Return request times [B, L] for each event; a share `told` of them is known."""
    rng = np.random.default_rng(seed)
    asked = times + torch.from_numpy(rng.choice([0, SECOND, DAY, 90 * DAY, -DAY], times.shape))
    return torch.where(torch.from_numpy(rng.random(times.shape) < told), asked, NO_REQUEST_TIME)


@torch.inference_mode()
def run(encoder: HistoryEncoder, vectors: Tensor, times: Tensor) -> Tensor:
    states: Tensor = encoder(vectors, times)
    return states


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 70])
def test_states_equal_the_loop(blocks: int, length: int) -> None:
    """Every event's state in every history of a batch equals plain loops over the weights."""
    model = random_model(3, blocks=blocks)
    vectors, times = events(length, 3, length)
    got = run(encoder_of(model), vectors, times)
    reference = ReferenceModel(model, heads=3)
    for row in range(3):
        expected = reference.states(list(vectors[row].double().numpy()), times[row].tolist())
        np.testing.assert_allclose(got[row], np.stack(expected), atol=2e-5)


@pytest.mark.parametrize("told", [0.0, 0.6, 1.0])
def test_user_states_equal_the_loop(
    model: Recommender, encoder: HistoryEncoder, told: float
) -> None:
    vectors, times = events(6, 2, 7)
    states, asked = run(encoder, vectors, times), requests(6, times, told)
    with torch.inference_mode():
        got = encoder.at_request(states, times, asked)
    reference = ReferenceModel(model, heads=3)
    for at in np.ndindex(2, 7):
        request_time = None if asked[at] == NO_REQUEST_TIME else int(asked[at])
        state = states[at].double().numpy()
        expected = reference.at_request(state, int(times[at]), request_time)
        np.testing.assert_allclose(got[at], expected, atol=1e-6)


def test_padding_has_no_effect(encoder: HistoryEncoder) -> None:
    """States of padded histories equal those of each history alone."""
    vectors, times = events(8, 3, 9)
    lengths = [9, 4, 1]
    for row, length in enumerate(lengths):
        vectors[row, length:] = 1e3
        times[row, length:] = -(2**40)
    together = run(encoder, vectors, times)
    for row, length in enumerate(lengths):
        part = slice(row, row + 1), slice(length)
        alone = run(encoder, vectors[part], times[part])
        np.testing.assert_allclose(together[row, :length], alone[0], atol=1e-6)


def test_a_clock_that_ran_backwards_is_no_gap(encoder: HistoryEncoder) -> None:
    """Falling times count as equal times."""
    vectors, times = events(10, 1, 5)
    falling = torch.arange(0, -5 * DAY, -DAY)[None]
    same = torch.zeros_like(times)
    np.testing.assert_array_equal(run(encoder, vectors, falling), run(encoder, vectors, same))


# ---------------------------------------------------------------------------- step by step


def appended(
    encoder: HistoryEncoder, vectors: Tensor, times: Tensor, cuts: list[int]
) -> list[EncoderCache]:
    """The caches [1 + chunks] of a history [L] that comes in chunks between these places."""
    caches = [encoder.empty_cache()]
    edges = [0, *cuts, len(times)]
    with torch.inference_mode():
        for first, last in pairwise(edges):
            caches.append(encoder.append(caches[-1], vectors[first:last], times[first:last]))
    return caches


def close(one: EncoderCache, other: EncoderCache) -> None:
    for mine, yours in zip(one, other, strict=True):
        assert mine.dtype == yours.dtype
        np.testing.assert_allclose(mine, yours, atol=1e-4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 90),
    blocks=st.sampled_from([1, 2, 3]),
    data=st.data(),
)
def test_incremental_states_equal_those_of_the_full_history(
    seed: int, length: int, blocks: int, data: st.DataObject
) -> None:
    encoder = encoder_of(random_model(seed % 7, blocks=blocks))
    vectors, times = events(seed, 1, length)
    whole = run(encoder, vectors, times)[0]
    cuts = st.just(list(range(1, length))) | st.lists(st.integers(0, length)).map(sorted)
    caches = appended(encoder, vectors[0], times[0], data.draw(cuts))
    assert len(caches[0]) == 0
    for cache in caches:
        np.testing.assert_allclose(cache.states, whole[: len(cache)], atol=1e-4)
    assert len(caches[-1]) == length
    np.testing.assert_array_equal(caches[-1].timestamps, times[0])
    close(caches[-1], appended(encoder, vectors[0], times[0], [])[-1])


def test_a_cache_is_never_written_to(encoder: HistoryEncoder) -> None:
    """Appending to a cache leaves it unchanged, and two branches are independent."""
    vectors, times = events(14, 2, 8)
    (past,) = appended(encoder, vectors[0, :5], times[0, :5], [])[1:]
    kept = [part.clone() for part in past]
    with torch.inference_mode():
        one = encoder.append(past, vectors[0, 5:], times[0, 5:])
        two = encoder.append(past, vectors[1, 5:], times[0, 5:] + DAY)
    for before, after in zip(kept, past, strict=True):
        np.testing.assert_array_equal(before, after)
    close(one, appended(encoder, vectors[0], times[0], [])[-1])
    assert not np.allclose(one.keys, two.keys, atol=1e-3)


# ------------------------------------------------------------------------------------- gated


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("length", [2, 3, 30])
def test_a_gate_of_zero_leaves_its_event_out(blocks: int, length: int) -> None:
    encoder = encoder_of(random_model(1, blocks=blocks))
    vectors, times = events(17, 1, length)
    with torch.inference_mode():
        whole = encoder.forward_gated(vectors[0], times[0], torch.ones(length))
        np.testing.assert_allclose(whole, run(encoder, vectors, times)[0], atol=2e-5)
        for event in range(length):
            others = torch.arange(length) != event
            less = encoder.forward_gated(vectors[0], times[0], others.float())[others]
            rest = run(encoder, vectors[:, others], times[:, others])[0]
            np.testing.assert_allclose(less, rest, atol=5e-5)


# ---------------------------------------------------------------------------- several at once


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    shared=st.integers(0, 9),
    more=st.integers(0, 3),
    follow=st.integers(1, 9),
    blocks=st.sampled_from([1, 2, 3]),
)
def test_states_depend_on_the_prefix_alone(
    seed: int, shared: int, more: int, follow: int, blocks: int
) -> None:
    """`branch` equals the full forward pass for each future of a shared prefix."""
    encoder = encoder_of(random_model(seed % 7, blocks=blocks))
    vectors, times = events(seed, 3, shared + follow)
    vectors[:, :shared], times[:, :shared] = vectors[0, :shared], times[0, :shared]
    kept, kept_times = events(seed + 1, 1, shared + more)
    kept[0, :shared], kept_times[0, :shared] = vectors[0, :shared], times[0, :shared]
    cache = appended(encoder, kept[0], kept_times[0], [])[-1]
    before = [part.clone() for part in cache]
    with torch.inference_mode():
        got = encoder.branch(cache, shared, vectors[:, shared:], times[:, shared:])
    whole = run(encoder, vectors, times)
    for row, branched in enumerate(got):
        np.testing.assert_allclose(branched.states, whole[row], atol=1e-4)
        close(branched, appended(encoder, vectors[row], times[row], [])[-1])
    for old, new in zip(before, cache, strict=True):
        np.testing.assert_array_equal(old, new)
