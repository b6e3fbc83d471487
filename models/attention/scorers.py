"""Scores of queries against keys: scaled dot product, cosine, additive."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Query [..., Q, d_q] and keys [..., K, d_k] give [..., Q, K]: a new tensor, to be written over."""

_LENGTHS = 1e-15, 1e15  # between which no square of a float32 overflows or vanishes
_BLOCK = 1 << 22  # floats of tanh(...) that `Additive` holds at once without gradients: 16 MiB


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
    if not (torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad)):
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


class Additive(nn.Module):
    """Additive score wᵀ tanh(W q + U k) (Bahdanau et al. 2015), a small network run for every pair.

    It has no inner-product structure, so it costs Q·K·hidden and no index can order it.
    """

    def __init__(self, query_dim: int, key_dim: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, hidden, bias=False)  # W
        self.key = nn.Linear(key_dim, hidden, bias=False)  # U
        self.weight = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / math.sqrt(hidden))  # w

    @classmethod
    def plain(cls, dim: int) -> Additive:
        """W = U = I and w = 1, so the score is Σ tanh(q + k): for vectors no one has trained."""
        scorer = cls(dim, dim, dim)
        nn.init.eye_(scorer.query.weight)
        nn.init.eye_(scorer.key.weight)
        nn.init.ones_(scorer.weight)
        return scorer

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores [..., Q, K] of query [..., Q, query_dim] and keys [..., K, key_dim]."""
        for name, x, layer in (("query", query, self.query), ("keys", keys, self.key)):
            if x.shape[-1] != layer.in_features:
                raise ValueError(
                    f"{name}: dimension {x.shape[-1]}, the scorer takes {layer.in_features}"
                )
        query = self.query(query).unsqueeze(-2)  # (..., Q, 1, hidden)
        keys = self.key(keys).unsqueeze(-3)  # (..., 1, K, hidden)
        rows = keys.shape[-2]
        one_row = math.prod(np.broadcast_shapes(query.shape, keys[..., :1, :].shape))
        if torch.is_grad_enabled() or one_row * rows <= _BLOCK:
            return torch.tanh(query + keys) @ self.weight
        step = max(1, _BLOCK // one_row)
        parts = [keys[..., at : at + step, :] for at in range(0, rows, step)]
        return torch.cat([torch.tanh(query + part) @ self.weight for part in parts], dim=-1)


def check_width(query: Tensor, keys: Tensor) -> None:
    """Raise ValueError unless the last dimensions agree."""
    if query.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"query: dimension {query.shape[-1]}, keys have {keys.shape[-1]}: they must agree"
        )
