"""Medians and quantiles of values that are divided among the shards of a log, exactly.

An order statistic is found by bisection: each step takes the sum of one number over the shards.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from models.data.log_shards import LogShards

_MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 without its sign


def median(values: NDArray[np.float32], shards: LogShards) -> np.float32:
    """Return the median of all finite values [n], as `np.median` of them together does.

    Raises ValueError without values.
    """
    if shards.count == 1 and len(values):
        return np.float32(np.median(values))
    # As integers, floats of one sign are in the order of their bits.
    bits = values.view(np.int32)
    keys = np.sort(np.where(bits < 0, bits ^ _MAGNITUDE, bits).astype(np.int64))
    last = _total(keys, shards) - 1
    found = [_order_statistic(keys, place, shards) for place in (last // 2, last - last // 2)]
    back = np.array(found, dtype=np.int32)
    return np.float32(np.median(np.where(back < 0, back ^ _MAGNITUDE, back).view(np.float32)))


def quantile(values: NDArray[np.int64], share: float, shards: LogShards) -> float:
    """Return a quantile of all values [n], as `np.quantile` of them together does.

    Raises ValueError without values.
    """
    if shards.count == 1 and len(values):
        return float(np.quantile(values, share))
    keys = np.sort(values)
    place = share * (_total(keys, shards) - 1)
    below = math.floor(place)
    ends = [_order_statistic(keys, at, shards) for at in (below, math.ceil(place))]
    return float(np.quantile(np.array(ends), place - below))


def _total(keys: NDArray[np.int64], shards: LogShards) -> int:
    total = shards.total(len(keys))
    if not total:
        raise ValueError("there are no values")
    return total


def _order_statistic(keys: NDArray[np.int64], place: int, shards: LogShards) -> int:
    """Return the value at a place, from 0, of all sorted keys [n]."""
    low = shards.min(int(keys[0]) if len(keys) else np.iinfo(np.int64).max)
    high = shards.max(int(keys[-1]) if len(keys) else np.iinfo(np.int64).min + 1)
    while low < high:
        middle = (low + high) // 2
        if shards.total(int(np.searchsorted(keys, middle, side="right"))) > place:
            high = middle
        else:
            low = middle + 1
    return low
