"""Checks on columns and counts that a caller gives; each names what it refuses."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T", bound=np.integer[Any])


def require_non_negative(name: str, value: int) -> int:
    """The value, a count. Raises ValueError below 0."""
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return value


def require_in_range(name: str, column: NDArray[Any], bound: int) -> None:
    """Raise ValueError unless every entry lies in [0, bound)."""
    if column.size and (column.min() < 0 or column.max() >= bound):
        worst = column.min() if column.min() < 0 else column.max()
        raise ValueError(f"{name} must lie in [0, {bound}), got {worst}")


def as_integers(name: str, values: ArrayLike, dtype: type[T]) -> NDArray[T]:
    """The values as 1-d whole numbers of `dtype`, refusing what would be rounded or wrapped.

    Raises ValueError for other numbers, more dimensions and what `dtype` cannot hold.
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
