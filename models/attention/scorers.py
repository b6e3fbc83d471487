"""Scores of queries against keys: scaled dot product, cosine, additive.

A new scorer also gets a name in `service.questions.attend.ScorerName` and a case in
`service.engine.questions.attend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Query [..., Q, d_q] and keys [..., K, d_k] give [..., Q, K]: a new tensor, to be written over."""

_LENGTHS = 1e-15, 1e15  # between which no square of a float32 overflows or vanishes
_BLOCK = 1 << 22  # floats of tanh(...) that `additive` holds at once: 16 MiB


def scaled_dot(query: Tensor, keys: Tensor) -> Tensor:
    """Scaled dot product q · k / √d (Vaswani et al. 2017).

    query [..., Q, d], keys [..., K, d] -> [..., Q, K].
    Raises ValueError when the last dimensions differ.
    """
    check_width(query, keys)
    # The product first, then the scale: scaling q first rounds each term, and exact ties drift.
    return (query @ keys.mT).div_(math.sqrt(query.shape[-1]))


def cosine(query: Tensor, keys: Tensor) -> Tensor:
    """Cosine of the angle between q and k, in [-1, 1].

    query [..., Q, d], keys [..., K, d] -> [..., Q, K]. A zero vector has cosine 0 with everything,
    and no gradient. Raises ValueError when the last dimensions differ.
    """
    check_width(query, keys)
    # q·k over the length of k reads the keys twice, where unit keys are as many as the keys.
    lengths = torch.linalg.vector_norm(keys, dim=-1)
    least, most = _LENGTHS
    if bool(((lengths > least) & (lengths < most)).all()):
        return (normalize(query) @ keys.mT).div_(lengths.unsqueeze(-2))
    return normalize(query) @ normalize(keys).mT


def normalize(vectors: Tensor) -> Tensor:
    """Each vector [..., d] divided by its length; a zero vector stays zero, with zero gradient."""
    # x/|x| does not change when x is scaled, so a constant scale may be divided out first:
    # squares then neither overflow nor vanish, and the gradient is still exact.
    scale = vectors.detach().abs().amax(-1, keepdim=True)
    zero = scale == 0
    scaled = vectors / scale.masked_fill(zero, 1)
    length = scaled.square().sum(-1, keepdim=True).masked_fill(zero, 1).sqrt()
    return scaled.masked_fill(zero, 0) / length


def additive(query: Tensor, keys: Tensor) -> Tensor:
    """Additive score Σ tanh(q + k): wᵀ tanh(W q + U k) (Bahdanau et al. 2015) before any training.

    query [..., Q, d], keys [..., K, d] -> [..., Q, K]. It has no inner-product structure, so it
    costs Q·K·d and no index can order it. Raises ValueError when the last dimensions differ.
    """
    check_width(query, keys)
    query, keys = query.unsqueeze(-2), keys.unsqueeze(-3)  # (..., Q, 1, d), (..., 1, K, d)
    weight = query.new_ones(query.shape[-1])
    one_row = math.prod(np.broadcast_shapes(query.shape, keys[..., :1, :].shape))
    parts = torch.split(keys, max(1, _BLOCK // max(1, one_row)), -2)
    return torch.cat([torch.tanh(query + part) @ weight for part in parts], -1)


def check_width(query: Tensor, keys: Tensor) -> None:
    """Raise ValueError unless the last dimensions agree."""
    if query.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"query: dimension {query.shape[-1]}, keys have {keys.shape[-1]}: they must agree"
        )
