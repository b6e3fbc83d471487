"""Event logs as columns, whole and in shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import Interactions, median, quantile
from tests.support.shards import in_processes
from tests.support.small import events_of, five_users, sequences


@pytest.fixture
def log() -> Interactions:
    return five_users()


def test_sorts_by_user_then_time_with_ties_in_the_order_given(log: Interactions) -> None:
    """Histories run oldest first; equal times keep the order in which they came."""
    assert sequences(log) == [[1, 2, 0], [4, 3, 2, 0], [0, 5], [], [1, 5]]
    assert events_of(log, 1).timestamps.tolist() == [1, 5, 5, 9]
    assert log.lengths.tolist() == [3, 4, 2, 0, 2]
    assert log.users.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 4, 4]
    assert log.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1]
    assert log.item_counts().tolist() == [3, 2, 2, 1, 1, 2]


def test_columns_keep_their_rows_together() -> None:
    """Weights and types travel with their event through the sort."""
    log = Interactions.from_columns(
        [1, 0, 1], [2, 1, 0], [9, 5, 3], [0.5, 2.0, 3.0], [7, 8, 9], n_users=2, n_items=3
    )
    assert log.items.tolist() == [1, 0, 2]
    assert log.weights.tolist() == [2.0, 3.0, 0.5]
    assert log.types.tolist() == [8, 9, 7]


def test_columns_have_the_declared_types_and_defaults(log: Interactions) -> None:
    assert log.weights.tolist() == [1.0] * 11
    assert log.types.tolist() == [0] * 11
    dtypes = [c.dtype for c in (log.items, log.timestamps, log.weights, log.types, log.offsets)]
    assert dtypes == [np.int32, np.int64, np.float32, np.int16, np.int64]


def test_dislikes_are_events_of_their_type() -> None:
    columns = [1, 0, 1, 0], [2, 1, 0, 2], [9, 5, 3, 6], None, [0, 1, 1, 2]
    log = Interactions.from_columns(*columns, n_users=2, n_items=3, dislike_type=1)
    assert log.disliked.tolist() == [True, False, True, False]
    assert sequences(log.liked()) == [[2], [2]]
    assert log.liked().dislike_type == log.where(~log.disliked).dislike_type == 1
    plain = Interactions.from_columns(*columns, n_users=2, n_items=3)
    assert not plain.disliked.any()
    assert sequences(plain.liked()) == sequences(plain)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0, 5], [0, 1], [1, 2]), r"users must lie in \[0, 5\), got 5"),
        (([0, -1], [0, 1], [1, 2]), r"users must lie in \[0, 5\), got -1"),
        (([0, 1], [0, 6], [1, 2]), r"items must lie in \[0, 6\), got 6"),
        (([0, 1], [0], [1, 2]), r"items must be \[2\] like users, got \[1\]"),
        (([0, 1], [0, 1], [1]), r"timestamps must be \[2\]"),
        (([0, 1], [0, 1], [1.5, 2.0]), "timestamps must be whole numbers"),
        (([0, 1], [0, 1 << 40], [1, 2]), "items must fit int32"),
        (([[0, 1]], [0, 1], [1, 2]), "users must be 1-d"),
        (([0, 1], [0, 1], [1, 2], [1.0, np.nan]), "weights must be finite"),
        (([0, 1], [0, 1], [1, 2], [1.0]), r"weights must be \[2\]"),
        (([0, 1], [0, 1], [1, 2], None, [0, 40_000]), "types must fit int16"),
    ],
)
def test_bad_columns_are_named(columns: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Interactions.from_columns(*columns, n_users=5, n_items=6)


def test_unknown_users_are_refused(log: Interactions) -> None:
    """A user outside the log is an IndexError, also when counted from the end."""
    for user in (5, -1):
        with pytest.raises(IndexError, match="5"):
            log.gather([0, user])


def test_where_selects_events(log: Interactions) -> None:
    assert sequences(log.where(log.items != 0)) == [[1, 2], [4, 3, 2], [5], [], [1, 5]]


def test_gather_lays_a_batch_end_to_end(log: Interactions) -> None:
    batch, events = log.gather([4, 3, 1, 4])
    assert batch.tolist() == [0, 0, 2, 2, 2, 2, 3, 3]
    assert log.items[events].tolist() == [1, 5, 4, 3, 2, 0, 1, 5]
    batch, events = log.gather([1, 0], last=2)
    assert batch.tolist() == [0, 0, 1, 1]
    assert log.items[events].tolist() == [2, 0, 2, 0]


COUNT = 3
SHARES = (0.0, 0.25, 0.5, 0.999, 1.0)


def drawn(index: int) -> dict[str, NDArray[Any]]:
    """Values of one shard; the second has none, the third most."""
    rng = np.random.default_rng(index)
    size = (40, 0, 501)[index]
    weights = rng.normal(0, 3, size).astype(np.float32)
    return {
        "gaps": rng.integers(0, 10**15, size) * rng.integers(0, 2, size),
        "weights": weights,
        "fewer": weights[index == 0 :],  # by one: their number in all shards is even
        "alike": np.full(size, 7, np.int64),
    }


def exchanged(shards: Processes) -> dict[str, Any]:
    own, index = drawn(shards.index), shards.index
    parts = [np.full(index + to, 10 * index + to, np.int64) for to in range(COUNT)]
    matrix = torch.full((5, 4), float(index + 1), dtype=torch.float64)
    shards.sum_on_first(matrix)
    return {
        "total": shards.total(index + 1),
        "any": [shards.any(index == 1), shards.any(False)],
        "extremes": [shards.min(index - 5), shards.max(index - 5)],
        "sum": shards.sum(np.array([[index, 1], [2, 3]])[:, ::-1]).tolist(),
        "matrix": matrix.tolist(),
        "gathered": shards.gather(own["gaps"]).tolist(),
        "objects": shards.gather_objects(f"of {index}"),
        "received": [part.tolist() for part in shards.exchange(parts)],
        "broadcast": [shards.broadcast(lambda: f"from {index}", source) for source in (0, 2)],
        "tensor": shards.broadcast_tensor(torch.full((2,), float(index))).tolist(),
        "quantiles": [
            [quantile(own[name], share, shards) for share in SHARES] for name in ("gaps", "alike")
        ],
        "medians": [float(median(each, shards)) for each in (own["weights"], own["fewer"])],
    }


def test_shards_agree_on_statistics() -> None:
    """Every process has the statistics of all values, bit by bit as NumPy computes them."""
    found = in_processes(COUNT, exchanged)
    values = [drawn(index) for index in range(COUNT)]
    every = {name: np.concatenate([each[name] for each in values]) for name in values[0]}
    assert (len(every["weights"]), len(every["fewer"])) == (541, 540)
    for index, own in enumerate(found):
        assert own["total"] == 6
        assert own["any"] == [True, False]
        assert own["extremes"] == [-5, -3]
        assert own["sum"] == [[3, 3], [9, 6]]
        assert own["gathered"] == every["gaps"].tolist()
        assert own["objects"] == ["of 0", "of 1", "of 2"]
        assert own["received"] == [[10 * of + index] * (of + index) for of in range(COUNT)]
        assert own["broadcast"] == ["from 0", "from 2"]
        assert own["tensor"] == [0.0, 0.0]
        assert own["quantiles"] == [
            [np.quantile(every[name], share) for share in SHARES] for name in ("gaps", "alike")
        ]
        medians = [float(np.median(every[name])) for name in ("weights", "fewer")]
        assert own["medians"] == medians
    assert found[0]["matrix"] == [[6.0] * 4] * 5


def test_one_shard_is_the_whole_log() -> None:
    """Without other shards every operation returns its argument, and needs no process group."""
    array = np.array([3, 1, 2])
    assert SINGLE_PROCESS.sum(array) is array
    assert SINGLE_PROCESS.gather(array) is array
    assert (SINGLE_PROCESS.total(4), SINGLE_PROCESS.min(4), SINGLE_PROCESS.max(4)) == (4, 4, 4)
    assert SINGLE_PROCESS.exchange([array])[0] is array
    assert SINGLE_PROCESS.gather_objects("own") == ["own"]
    assert SINGLE_PROCESS.broadcast(lambda: 5) == 5
    assert quantile(array, 0.5, SINGLE_PROCESS) == 2.0
    with pytest.raises(ValueError, match="there are no values"):
        quantile(array[:0], 0.5, SINGLE_PROCESS)
    with pytest.raises(ValueError, match="there are no values"):
        median(np.zeros(0, np.float32), SINGLE_PROCESS)
