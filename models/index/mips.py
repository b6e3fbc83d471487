"""Maximum inner product search: keys and queries as points whose inner product is the score."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


def normalize_rows(vectors: Floats) -> Floats:
    """Divide each of vectors [n, d] by its length; a zero vector stays zero."""
    wide = vectors.astype(np.float64)  # the square of any float32 fits
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    np.divide(wide, length, out=wide, where=length > 0)
    return wide.astype(np.float32)


def augment(points: Floats, bias: Floats) -> tuple[Floats, float, Mask | None]:
    """Append a bias on the score as one more dimension: (k, b - o)·(q, 1) = q·k + b - o.

    The offset o is the middle of the biases: subtracted from all of them it changes no order, and
    the rest adds no more length to the points than it must.

    Args:
        points: float32 [n, d].
        bias: float32 [n]; -inf hides its row.

    Returns:
        tuple: points [n, d + 1], the offset, and which rows are hidden [n], or None for no row.

    Raises:
        ValueError: for a misshapen bias, NaN or +inf.
    """
    column, offset, hidden = centre_bias(bias, len(points))
    return np.hstack([points, column[:, None]]), offset, hidden


def centre_bias(bias: Floats, count: int) -> tuple[Floats, float, Mask | None]:
    """Return the dimension [n] that `augment` appends, the offset, and the hidden rows.

    Args:
        bias: float32 [n]; -inf hides its row.
        count: n.
    """
    if bias.shape != (count,):
        raise ValueError(f"bias: must be [{count}], got {list(bias.shape)}")
    hidden = bias == -np.inf
    shown = bias[~hidden]
    if not np.isfinite(shown).all():
        raise ValueError("bias: must be finite or -inf")
    offset = float((shown.min() + shown.max()) / 2) if len(shown) else 0.0
    column = np.where(hidden, 0.0, bias - offset).astype(np.float32)
    return column, offset, hidden if hidden.any() else None


def equal_norms(points: Floats, *, query: bool = False) -> Floats:
    """Append a dimension that raises all norms to the largest, and is 0 for a query.

    The order of angles is then the order of inner products (Bachrach et al. 2014, section 3).
    """
    last = np.zeros((len(points), 1), np.float32)
    if not query:
        squares = np.einsum("nd,nd->n", points, points)
        last[:, 0] = np.sqrt(np.maximum(squares.max() - squares, 0))
    return np.hstack([points, last])
