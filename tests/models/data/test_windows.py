"""Windows of histories: what they cover, what they cost, and where the encoder begins to read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.data.windows import (
    batch_shard,
    batch_windows,
    newest_windows,
    pad_windows,
    tile_windows,
    window_start,
)
from tests.support import reference_model
from tests.support.shards import in_threads

quick = settings(max_examples=60, deadline=None, derandomize=True)
lengths_of_users = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def log_of(lengths: list[int], seed: int = 0) -> Interactions:
    """Users of these lengths, over nine items, at times that repeat."""
    rng = np.random.default_rng(seed)
    events = sum(lengths)
    return Interactions.from_columns(
        np.repeat(np.arange(len(lengths)), lengths),
        rng.integers(0, 9, events),
        rng.integers(0, 50, events),
        rng.uniform(0.2, 3, events),
        n_users=len(lengths),
        n_items=9,
    )


# ---------------------------------------------------------------------------- rectangles


@quick
@given(lengths=lengths_of_users, seed=st.integers(0, 1000), data=st.data())
def test_padded_windows_hold_their_events(
    lengths: list[int], seed: int, data: st.DataObject
) -> None:
    log = log_of(lengths, seed)
    ends = st.integers(0, len(log)).flatmap(
        lambda end: st.tuples(st.integers(0, end), st.just(end))
    )
    spans = np.array(data.draw(st.lists(ends, min_size=1, max_size=6)), dtype=np.int64)
    found = pad_windows(log, spans[:, 0], spans[:, 1])
    width = max(1, int((spans[:, 1] - spans[:, 0]).max()))
    for part in found[:4]:
        assert part.shape == (len(spans), width)
    for row, (begin, end) in enumerate(spans.tolist()):
        size = end - begin
        assert found.lengths[row] == size
        assert found.events[row, :size].tolist() == list(range(begin, end))
        np.testing.assert_array_equal(found.items[row, :size], log.items[begin:end])
        np.testing.assert_array_equal(found.timestamps[row, :size], log.timestamps[begin:end])
        np.testing.assert_array_equal(found.weights[row, :size], log.weights[begin:end])
        assert (found.items[row, size:] == 0).all()
        assert (found.weights[row] > 0).all()
        if size:
            assert (found.timestamps[row, size:] == log.timestamps[end - 1]).all()
        if len(log):
            assert (found.events[row] < len(log)).all()


def test_windows_of_an_empty_log() -> None:
    log = log_of([0, 0])
    found = newest_windows(log, np.array([0, 1], np.int32), 5)
    assert found.items.tolist() == [[0], [0]]
    assert found.lengths.tolist() == [0, 0]
    assert pad_windows(log, np.zeros(0, np.int64), np.zeros(0, np.int64)).items.shape == (0, 1)


# ---------------------------------------------------------------------------- where reading begins


@given(length=st.integers(0, 2_000), window=st.integers(1, 300))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_window_begins_within_bounds(length: int, window: int) -> None:
    start = window_start(length, window)
    read = length - start
    assert start == reference_model.window_start(length, window)
    assert 0 <= start <= length
    assert read <= window
    if length <= window:
        assert start == 0
    else:
        assert read > window - max(1, window // 4)


@pytest.mark.parametrize("window", [1, 3, 4, 7, 8, 200])
def test_the_window_moves_in_steps(window: int) -> None:
    starts = np.array([window_start(length, window) for length in range(6 * window)])
    moved = np.diff(starts)
    step = max(1, window // 4)
    assert set(moved.tolist()) <= {0, step}
    places = np.flatnonzero(moved) + 1  # the lengths at which it moved
    assert places[0] == window + 1
    assert (np.diff(places) == step).all()


def test_newest_windows_by_hand() -> None:
    log = log_of([3, 0, 11, 8])
    found = newest_windows(log, np.array([2, 1, 0, 3, 2], np.int32), 8)
    # Of 11 events with a window of 8 and steps of 2 the first 4 are left out.
    assert found.lengths.tolist() == [7, 0, 3, 8, 7]
    assert found.events[0, :7].tolist() == list(range(7, 14))
    assert found.events[2, :3].tolist() == [0, 1, 2]
    assert found.events[3].tolist() == list(range(14, 22))
    np.testing.assert_array_equal(found.items[0, :7], log.items[7:14])


# ---------------------------------------------------------------------------- windows and batches


@quick
@given(lengths=lengths_of_users, longest=st.integers(2, 30), seed=st.integers(0, 1000))
def test_windows_cover_every_target(lengths: list[int], longest: int, seed: int) -> None:
    """Windows of one user each cover every event but the first as a target.

    The last window ends with the history, and no window is there twice.
    """
    log = log_of(lengths)
    spans = tile_windows(log, longest, np.random.default_rng(seed))
    targets: set[int] = set()
    for first, end in spans.tolist():
        assert 2 <= end - first <= longest
        assert log.users[first] == log.users[end - 1]
        targets.update(range(first + 1, end))
    assert sorted(targets) == [event for event in range(len(log)) if log.positions[event] > 0]
    assert len(np.unique(spans, axis=0)) == len(spans)
    last = {int(log.offsets[user + 1]) for user, length in enumerate(lengths) if length >= 2}
    assert last <= set(spans[:, 1].tolist())


def test_windows_are_drawn_anew() -> None:
    """Windows differ from epoch to epoch and repeat for a seed."""
    log = log_of([400])
    generator = np.random.default_rng(0)
    first, second = tile_windows(log, 50, generator), tile_windows(log, 50, generator)
    assert first.tolist() != second.tolist()
    assert tile_windows(log, 50, np.random.default_rng(0)).tolist() == first.tolist()


def test_windows_overlap_by_less_than_half() -> None:
    log = log_of([1_000])
    for seed in range(20):
        spans = tile_windows(log, 40, np.random.default_rng(seed))
        steps = -np.diff(spans[:, 1])
        assert (steps >= 20).all()
        assert (steps < 40).all()


@quick
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    tokens=st.integers(1, 300),
    seed=st.integers(0, 1000),
)
def test_batches_hold_within_their_budget(lengths: list[int], tokens: int, seed: int) -> None:
    """All windows, each once; at most `tokens` padded inputs in each batch, or one window alone."""
    ends = np.cumsum(lengths)
    spans = np.stack([ends - lengths, ends], 1)
    parts = batch_windows(spans, tokens, np.random.default_rng(seed))
    assert sorted(map(tuple, np.concatenate(parts).tolist())) == list(map(tuple, spans.tolist()))
    for part in parts:
        inputs = part[:, 1] - part[:, 0] - 1
        assert len(part) == 1 or inputs.max() * len(part) <= tokens


def test_windows_of_like_length_are_together() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 60, 800)
    ends = np.cumsum(lengths)
    spans = np.stack([ends - lengths, ends], 1)
    parts = batch_windows(spans, 300, rng)
    inputs = [part[:, 1] - part[:, 0] - 1 for part in parts]
    padded = sum(int(each.max()) * len(each) for each in inputs)
    assert padded < 1.1 * (lengths - 1).sum()
    longest = [int(each.max()) for each in inputs]
    assert longest != sorted(longest)
    again = batch_windows(spans, 300, np.random.default_rng(1))
    other = batch_windows(spans, 300, np.random.default_rng(1))
    assert [part.tolist() for part in again] == [part.tolist() for part in other]


def tiled(lengths: list[int]) -> NDArray[np.int64]:
    """Windows of these lengths, one after another."""
    sizes = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    return np.stack([ends - sizes, ends], 1)


def batched(every: list[list[int]], tokens: int, seed: int = 0) -> list[list[NDArray[np.int64]]]:
    """The batches of each shard, of windows of these lengths."""
    return in_threads(
        len(every),
        lambda shards: batch_shard(
            tiled(every[shards.index]),
            tokens,
            shards,
            np.random.default_rng((seed, shards.index)),
            np.random.default_rng(seed),
        ),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    every=st.lists(st.lists(st.integers(2, 40), max_size=30), min_size=2, max_size=3),
    tokens=st.integers(1, 300),
)
def test_shards_take_the_same_steps(every: list[list[int]], tokens: int) -> None:
    """All shards have as many batches, each window in one, of as many windows as fit into it."""
    found = batched(every, tokens)
    (steps,) = {len(batches) for batches in found}
    for lengths, batches in zip(every, found, strict=True):
        windows = np.concatenate(batches)
        assert sorted(map(tuple, windows.tolist())) == list(map(tuple, tiled(lengths).tolist()))
    for step in range(steps):
        inputs = np.concatenate([batches[step] for batches in found]) @ [-1, 1] - 1
        fitting = max(1, tokens // int(inputs.max(initial=1)))
        # A window of each shard may stand on the other side of either end of the batch.
        assert len(inputs) <= fitting + 2 * len(every)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.0])
def test_steps_of_shards_are_as_those_of_one_process(share: float) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 60, 2_000)
    alone = [batch @ [-1, 1] - 1 for batch in batch_windows(tiled(lengths.tolist()), 600, rng)]
    first = rng.random(len(lengths)) < share
    shards = batched([lengths[first].tolist(), lengths[~first].tolist()], 600)
    found = [np.concatenate(step) @ [-1, 1] - 1 for step in zip(*shards, strict=True)]
    assert len(found) == pytest.approx(len(alone), rel=0.1)
    padded = [int(inputs.max()) * len(inputs) for inputs in found]
    assert sum(padded) <= sum(int(inputs.max()) * len(inputs) for inputs in alone)
    assert np.quantile(padded, 0.99) < 1.15 * 600
    assert np.quantile(padded, 0.05) > 0.8 * 600
    # A shard's part of a step is about its share of all windows of these lengths.
    parts = np.array([len(step[0]) / sum(map(len, step)) for step in zip(*shards, strict=True)])
    assert parts.mean() == pytest.approx(first.mean(), abs=0.02)
    assert parts.std() < 0.1
    longest = [int(inputs.max()) for inputs in found]
    assert longest != sorted(longest)


def test_small_steps_of_many_shards_stay_small() -> None:
    found = batched([[21] * 50] * 4, 40)  # two windows a step, of four shards
    taken = np.array([[len(batch) for batch in batches] for batches in found])
    assert taken.sum(axis=0).tolist() == [2] * 100
