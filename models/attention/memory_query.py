"""A question to a memory: targets, a bias and a mask, over all rows or over chosen ones.

Shapes: T targets, H heads, n rows. Memories keep rows first and queries keep targets first; the
operator wants heads first. The turning is done here and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from models.attention.attend import Attention, attend, logits
from models.attention.kv_memory import KeyValueMemory
from models.attention.scorers import Scorer, scaled_dot


@dataclass(frozen=True, eq=False)
class MemoryQuery:
    """Targets that ask, and the memory that is asked.

    query: [T, H, d_k]. bias (added to the memory's own) and visible (bool, True = may be attended):
    [n], or three-dimensional and broadcastable to [T, H, n]; -inf in a bias hides as a mask does.

    Raises ValueError, naming the argument, when shapes or types do not fit.
    """

    query: Tensor
    memory: KeyValueMemory
    bias: Tensor | None = None
    visible: Tensor | None = None
    score: Scorer = scaled_dot

    def __post_init__(self) -> None:
        heads, n = self.memory.heads, len(self.memory)
        if self.query.dim() != 3 or self.query.shape[1] != heads:
            raise ValueError(f"query: must be [T, {heads}, d], got {list(self.query.shape)}")
        if self.visible is not None and self.visible.dtype != torch.bool:
            raise ValueError(
                f"visible: must be bool (True = may be attended), got {self.visible.dtype}"
            )
        full = (self.query.shape[0], heads, n)
        for name, x in (("bias", self.bias), ("visible", self.visible)):
            if x is None or (x.dim() == 1 and len(x) == n):
                continue
            # Two dimensions could mean targets or heads, and would broadcast when those agree.
            fits = x.dim() == 3 and all(a in (1, b) for a, b in zip(x.shape, full, strict=True))
            if not fits or x.shape[2] != n:
                raise ValueError(
                    f"{name}: must be [{n}], or three-dimensional and broadcastable to "
                    f"{list(full)} with all {n} rows, got {list(x.shape)}"
                )

    @cached_property
    def seen(self) -> Tensor | None:
        """What the mask and biases of -inf leave visible: [T or 1, H or 1, n]; None = all of it."""
        seen = None if self.visible is None else _cube(self.visible)
        own = self.memory.bias
        for bias in (None if own is None else _cube(own), self.bias):
            if bias is not None and bool((bias == -math.inf).any()):
                shown = _cube(bias) > -math.inf
                seen = shown if seen is None else seen & shown
        return seen

    def attend(self, *, temperature: float = 1.0, hard: bool = False) -> Attention:
        """Over every row: weights [T, H, n], rows None, context [T, H, d_v], mass 1 [T, H]."""
        found = attend(
            self.query.transpose(0, 1),  # (H, T, d_k)
            self.memory.keys.transpose(0, 1),
            self.memory.values.transpose(0, 1),
            bias=self._bias(),
            visible=None if self.visible is None else _cube(self.visible).transpose(0, 1),
            score=self.score,
            temperature=temperature,
            hard=hard,
        )
        mass = self.query.new_ones(self.query.shape[:2])
        return Attention(found.weights.transpose(0, 1), None, found.context.transpose(0, 1), mass)

    def attend_rows(
        self, rows: Tensor, *, temperature: float = 1.0, hard: bool = False
    ) -> Attention:
        """Over rows [T, H, k] alone, -1 = none: weights [T, H, k], context [T, H, d_v], no mass."""
        keys, bias, present = self._at(rows)
        head = torch.arange(self.memory.heads, device=rows.device)[:, None]
        found = attend(
            self.query[:, :, None],  # (T, H, 1, d_k)
            keys,
            self.memory.values[rows.clamp(min=0), head],
            bias=bias,
            visible=present,
            score=self.score,
            temperature=temperature,
            hard=hard,
        )
        return Attention(found.weights[:, :, 0], rows, found.context[:, :, 0], None)

    def logits_at(self, rows: Tensor) -> Tensor:
        """The logits [T, H, k] of rows [T, H, k]; -inf where hidden, and for -1."""
        keys, bias, present = self._at(rows)
        query = self.query[:, :, None]
        return logits(query, keys, bias=bias, visible=present, score=self.score)[:, :, 0]

    def logits_of(self, rows: Tensor) -> Tensor:
        """The logits [T, H, m] of the same rows [m] for every target; -inf where hidden."""
        return logits(
            self.query.transpose(0, 1),
            self.memory.keys[rows].transpose(0, 1),
            bias=self._bias(rows),
            visible=None if self.seen is None else self.seen[..., rows].transpose(0, 1),
            score=self.score,
        ).transpose(0, 1)

    def _at(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Keys [T, H, k, d_k], bias and visibility [T, H, 1, k] of rows [T, H, k]."""
        memory, index, present = self.memory, rows.clamp(min=0), rows >= 0
        head = torch.arange(memory.heads, device=rows.device)[:, None]
        bias = None
        if memory.bias is not None:
            bias = memory.bias[index] if memory.bias.dim() == 1 else memory.bias[head, index]
        if self.bias is not None:
            extra = _cube(self.bias).expand(*rows.shape[:2], -1).gather(2, index)
            bias = extra if bias is None else bias + extra
        if self.visible is not None:
            present = present & _cube(self.visible).expand(*rows.shape[:2], -1).gather(2, index)
        bias = None if bias is None else bias[:, :, None]
        return memory.keys[index, head], bias, present[:, :, None]

    def _bias(self, rows: Tensor | None = None) -> Tensor | None:
        """Both biases, at `rows` or all of them: broadcastable to [H, T, rows]."""
        parts = [_cube(b).transpose(0, 1) for b in (self.memory.bias, self.bias) if b is not None]
        if rows is not None:
            parts = [part[..., rows] for part in parts]
        return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _cube(x: Tensor) -> Tensor:
    """[n] and a memory's [H, n] as [1, 1, n] and [1, H, n]."""
    return x[(None,) * (3 - x.dim())]
