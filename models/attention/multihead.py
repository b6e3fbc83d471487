"""Heads: independent spaces that each attend, and the trained projections into and out of them.

Source: Vaswani et al. 2017.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.attention.attend import Attention, attend
from models.attention.scorers import Scorer, scaled_dot


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., n, heads·d] -> [..., heads, n, d].

    Raises ValueError when the width is not a multiple of `heads`.
    """
    if heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"heads: {heads} does not divide the width {x.shape[-1]}")
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """[..., heads, n, d] -> [..., n, heads·d]."""
    return x.transpose(-3, -2).flatten(-2)


class MultiHeadAttention(nn.Module):
    """Trained projections around `attend`: W_Q, W_K, W_V into independent heads, W_O out of them.

    Self-attention and cross-attention are the same call: in the first, `memory` is the query.
    `tied` makes W_V the same matrix as W_K (values are keys). `key_dim` and `value_dim` are per
    head. Raises ValueError when the heads do not divide `dim`, or tied dimensions differ.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        memory_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
        tied: bool = False,
        score: Scorer = scaled_dot,
    ) -> None:
        super().__init__()
        if heads < 1 or (key_dim is None and dim % heads):
            raise ValueError(f"heads: {heads} does not divide dim {dim}; give key_dim")
        key_dim = key_dim or dim // heads
        value_dim = value_dim or key_dim
        if tied and value_dim != key_dim:
            raise ValueError(
                f"value_dim: tied needs value_dim = key_dim, got {value_dim}, {key_dim}"
            )
        self.heads = heads
        self.score = score
        self.w_q = nn.Linear(dim, heads * key_dim, bias=False)
        self.w_k = nn.Linear(memory_dim or dim, heads * key_dim, bias=False)
        # None, not a second name for w_k: a shared tensor would be saved twice.
        self.w_v = None if tied else nn.Linear(memory_dim or dim, heads * value_dim, bias=False)
        self.w_o = nn.Linear(heads * value_dim, out_dim or dim, bias=False)

    @property
    def tied(self) -> bool:
        """True when W_V is W_K."""
        return self.w_v is None

    def queries(self, query: Tensor) -> Tensor:
        """[..., Q, dim] -> [..., heads, Q, key_dim]."""
        return split_heads(self.w_q(query), self.heads)

    def keys(self, memory: Tensor) -> Tensor:
        """[..., K, memory_dim] -> [..., heads, K, key_dim]; may be kept and reused."""
        return split_heads(self.w_k(memory), self.heads)

    def values(self, memory: Tensor) -> Tensor:
        """[..., K, memory_dim] -> [..., heads, K, value_dim]; may be kept and reused."""
        return split_heads((self.w_k if self.w_v is None else self.w_v)(memory), self.heads)

    def forward(
        self,
        query: Tensor,
        memory: Tensor,
        *,
        bias: Tensor | None = None,
        visible: Tensor | None = None,
        temperature: float = 1.0,
        hard: bool = False,
    ) -> Attention:
        """Each query [..., Q, dim] attends over memory [..., K, memory_dim].

        `bias` and `visible` broadcast to [..., heads, Q, K]: a mask per sequence of a batch needs a
        head dimension of 1. The context is [..., Q, out_dim], weights [..., heads, Q, K].
        """
        keys = self.keys(memory)
        found = attend(
            self.queries(query),
            keys,
            keys if self.tied else self.values(memory),
            bias=bias,
            visible=visible,
            score=self.score,
            temperature=temperature,
            hard=hard,
        )
        return found._replace(context=self.w_o(merge_heads(found.context)))
