"""Key-value memory, row i being one record in every head, and the projections that make its rows.

W_Q, W_K and W_V project into independent heads, W_O out of them: Vaswani et al. 2017, section
3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class KeyValueMemory:
    """Frozen rows.

    keys: [n, H, d_k]. values: [n, H, d_v]. bias: added to every score of a row, [n] or, per head,
    [H, n]; -inf hides the row; None = zero.

    Raises ValueError, naming the field, when shapes, row counts or types do not agree.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        for name, x in (("keys", self.keys), ("values", self.values)):
            if x.dim() != 3:
                raise ValueError(f"{name}: must be [n, heads, d], got {list(x.shape)}")
            if not x.is_floating_point():
                raise ValueError(f"{name}: must be floating point, got {x.dtype}")
        if self.values.shape[:2] != self.keys.shape[:2]:
            raise ValueError(
                f"values: [n, heads] is {list(self.values.shape[:2])}, "
                f"keys have {list(self.keys.shape[:2])}: they must agree"
            )
        if self.values.dtype != self.keys.dtype:
            raise ValueError(f"values: {self.values.dtype}, keys are {self.keys.dtype}")
        n, heads = self.keys.shape[:2]
        if self.bias is not None:
            if self.bias.shape not in ((n,), (heads, n)):
                raise ValueError(
                    f"bias: must be [{n}] or [{heads}, {n}], got {list(self.bias.shape)}"
                )
            if self.bias.dtype != self.keys.dtype:
                raise ValueError(f"bias: {self.bias.dtype}, keys are {self.keys.dtype}")

    def __len__(self) -> int:
        return self.keys.shape[0]

    @property
    def heads(self) -> int:
        return self.keys.shape[1]


class KVTable(NamedTuple):
    """Keys [H, N, d] and values [H, N, d_v]; some of them are a memory's rows."""

    keys: Tensor
    values: Tensor


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Select rows [T] of a table [H, N, d] into a copy [H, T, d] contiguous by head.

    Selects along the first dimension of the transposed table, as it lies in memory: along its
    second dimension torch would copy all of it first, and fancy indexing takes several times as
    long.
    """
    if not table.shape[1]:
        return table.new_zeros(table.shape[0], len(rows), table.shape[2])
    return table.transpose(0, 1).index_select(0, rows).transpose(0, 1).contiguous()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., n, heads·d] -> [..., heads, n, d]; raises ValueError for another width."""
    if heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"heads: {heads} does not divide the width {x.shape[-1]}")
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """[..., heads, n, d] -> [..., n, heads·d]."""
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
        return self.w_v is None

    def queries(self, targets: Tensor) -> Tensor:
        """Project targets [..., T, dim] to [..., heads, T, d]."""
        return split_heads(self.w_q(targets), self.heads)

    def keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Project rows [..., n, dim] to keys and values [..., heads, n, d], one tensor if tied."""
        keys = split_heads(self.w_k(rows), self.heads)
        return keys, keys if self.w_v is None else split_heads(self.w_v(rows), self.heads)
