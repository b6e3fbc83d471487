"""Argument checks for counts and index columns; every error names the argument."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T", bound=np.integer[Any])


def require_non_negative(name: str, value: int) -> int:
    """Return a count unchanged. Raises ValueError if it is negative."""
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return value


def require_in_range(name: str, column: NDArray[Any], bound: int) -> None:
    """Raise ValueError unless every entry lies in [0, bound)."""
    if column.size and (column.min() < 0 or column.max() >= bound):
        worst = column.min() if column.min() < 0 else column.max()
        raise ValueError(f"{name} must lie in [0, {bound}), got {worst}")


def as_integers(name: str, values: ArrayLike, dtype: type[T]) -> NDArray[T]:
    """Convert to a 1-d integer array of `dtype` without rounding or wrap-around.

    Raises ValueError for non-integers, other than one dimension, and values out of range.
    """
    column = np.asarray(values)
    if column.size and column.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got {column.dtype}")
    if column.ndim != 1:
        raise ValueError(f"{name} must be 1-d, got {column.ndim}-d")
    limits = np.iinfo(dtype)
    if column.size and (column.min() < limits.min or column.max() > limits.max):
        raise ValueError(f"{name} must fit {np.dtype(dtype)}")
    return column.astype(dtype, copy=False)
