"""A memory: rows of (key, value). Row i is one record everywhere, in every head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KeyValueMemory:
    """Frozen rows. Every change returns a new memory; the old one stays as it was.

    keys: [n, H, d_k]. values: [n, H, d_v]. ids: one string for each row, not necessarily unique
    (a repeated view is two rows), or None. bias: what is added to every score of a row, [n] or,
    per head, [H, n]; -inf hides the row; None = zero.

    Raises ValueError, naming the field, when shapes, row counts or types do not agree.
    """

    keys: Tensor
    values: Tensor
    ids: tuple[str, ...] | None = None
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
        if self.ids is not None and len(self.ids) != n:
            raise ValueError(f"ids: {len(self.ids)} for {n} rows")
        if self.bias is not None:
            if self.bias.shape not in ((n,), (heads, n)):
                raise ValueError(
                    f"bias: must be [{n}] or [{heads}, {n}], got {list(self.bias.shape)}"
                )
            if self.bias.dtype != self.keys.dtype:
                raise ValueError(f"bias: {self.bias.dtype}, keys are {self.keys.dtype}")

    @classmethod
    def empty(
        cls, heads: int, key_dim: int, value_dim: int, *, dtype: torch.dtype = torch.float32
    ) -> KeyValueMemory:
        """A memory without rows and without ids."""
        return cls(
            torch.empty(0, heads, key_dim, dtype=dtype),
            torch.empty(0, heads, value_dim, dtype=dtype),
        )

    def __len__(self) -> int:
        return self.keys.shape[0]

    @property
    def heads(self) -> int:
        """The number of heads H."""
        return self.keys.shape[1]

    def bias_of(self, head: int) -> Tensor | None:
        """The row bias [n] of one head."""
        return self.bias if self.bias is None or self.bias.dim() == 1 else self.bias[head]

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        *,
        ids: Sequence[str] | None = None,
        bias: Tensor | None = None,
    ) -> KeyValueMemory:
        """A new memory with these rows, shaped as the fields are, after the present ones."""
        return self.merge(KeyValueMemory(keys, values, None if ids is None else tuple(ids), bias))

    def merge(self, other: KeyValueMemory) -> KeyValueMemory:
        """A new memory: these rows, then the other's. A missing bias counts as zero.

        Raises ValueError when heads or dimensions differ, or only one of two non-empty memories
        has ids.
        """
        for name, a, b in (("keys", self.keys, other.keys), ("values", self.values, other.values)):
            if a.shape[1:] != b.shape[1:]:
                raise ValueError(
                    f"{name}: [heads, d] is {list(b.shape[1:])}, "
                    f"this memory has {list(a.shape[1:])}: they must agree"
                )
        both = len(self) > 0 and len(other) > 0
        if both and (self.ids is None) != (other.ids is None):
            raise ValueError("ids: both memories must have them, or neither")
        no_ids = self.ids is None and other.ids is None
        return KeyValueMemory(
            torch.cat([self.keys, other.keys]),
            torch.cat([self.values, other.values]),
            None if no_ids else (self.ids or ()) + (other.ids or ()),
            _join(self, other),
        )

    def take(self, rows: Tensor | NDArray[np.integer] | Sequence[int]) -> KeyValueMemory:
        """A new memory of these rows [m], in this order; a row may come twice.

        Raises IndexError for a row outside 0 … n-1.
        """
        index = torch.as_tensor(rows, device=self.keys.device).long().reshape(-1)
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(self)):
            raise IndexError(f"rows: must be within 0..{len(self) - 1}, got {rows}")
        return KeyValueMemory(
            self.keys[index],
            self.values[index],
            None if self.ids is None else tuple(self.ids[i] for i in index.tolist()),
            None if self.bias is None else self.bias[..., index],
        )


def _join(first: KeyValueMemory, second: KeyValueMemory) -> Tensor | None:
    if first.bias is None and second.bias is None:
        return None
    parts = [
        m.keys.new_zeros(len(m)) if m.bias is None else m.bias for m in (first, second)
    ]  # each [n] or [H, n]
    if any(part.dim() == 2 for part in parts):
        parts = [part.expand(first.heads, -1) for part in parts]
    return torch.cat(parts, dim=-1)
