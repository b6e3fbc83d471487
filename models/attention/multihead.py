"""Multi-head projections: W_Q, W_K and W_V into independent heads, W_O out of them.

Source: Vaswani et al. 2017, section 3.2.2.
"""

from __future__ import annotations

from torch import Tensor, nn


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split the width into heads: [..., n, heads·d] -> [..., heads, n, d].

    Raises ValueError when the width is not a multiple of `heads`.
    """
    if heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"heads: {heads} does not divide the width {x.shape[-1]}")
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """Lay heads side by side: [..., heads, n, d] -> [..., n, heads·d]."""
    return x.transpose(-3, -2).flatten(-2)


class HeadProjections(nn.Module):
    """The trained matrices around multi-head attention; keys and values can be cached.

    `tied` makes W_V the same matrix as W_K (values are keys).
    """

    def __init__(self, dim: int, heads: int, size: int, *, tied: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.w_q = nn.Linear(dim, heads * size, bias=False)
        self.w_k = nn.Linear(dim, heads * size, bias=False)
        # None, not a second name for w_k: a shared tensor would be saved twice.
        self.w_v = None if tied else nn.Linear(dim, heads * size, bias=False)
        self.w_o = nn.Linear(heads * size, dim, bias=False)

    @property
    def tied(self) -> bool:
        """True when W_V is W_K."""
        return self.w_v is None

    def queries(self, targets: Tensor) -> Tensor:
        """Project targets [..., T, dim] to queries [..., heads, T, d]."""
        return split_heads(self.w_q(targets), self.heads)

    def keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Project memory rows [..., n, dim] to keys and values [..., heads, n, d].

        They are one tensor if tied.
        """
        keys = split_heads(self.w_k(rows), self.heads)
        return keys, keys if self.w_v is None else split_heads(self.w_v(rows), self.heads)
