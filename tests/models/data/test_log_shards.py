"""Collective operations on statistics, in real processes, beside NumPy on all values together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.data.interactions import WHOLE_LOG, LogShards, median, quantile
from tests.support.shards import in_processes

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


def exchanged(shards: LogShards) -> dict[str, Any]:
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
    assert WHOLE_LOG.sum(array) is array
    assert WHOLE_LOG.gather(array) is array
    assert (WHOLE_LOG.total(4), WHOLE_LOG.min(4), WHOLE_LOG.max(4)) == (4, 4, 4)
    assert WHOLE_LOG.exchange([array])[0] is array
    assert WHOLE_LOG.gather_objects("own") == ["own"]
    assert WHOLE_LOG.broadcast(lambda: 5) == 5
    assert quantile(array, 0.5, WHOLE_LOG) == 2.0
    with pytest.raises(ValueError, match="there are no values"):
        quantile(array[:0], 0.5, WHOLE_LOG)
    with pytest.raises(ValueError, match="there are no values"):
        median(np.zeros(0, np.float32), WHOLE_LOG)
