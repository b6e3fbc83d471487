"""Queries over one memory: the operator over all of its rows, or over chosen ones.

Shapes: T targets, H heads, n rows. Memories lay rows first and queries targets first; the operator
wants heads first. The transposition is done here and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention.attend import Attention, attend, logits
from models.attention.kv_memory import KeyValueMemory
from models.attention.scorers import Scorer, scaled_dot


@dataclass(frozen=True, eq=False, slots=True)
class MemoryQuery:
    """Queries [T, H, d_k] of T targets over a memory; a bias of -inf in it hides a row.

    Raises ValueError when the queries do not have the memory's heads.
    """

    query: Tensor
    memory: KeyValueMemory
    score: Scorer = scaled_dot

    def __post_init__(self) -> None:
        if self.query.dim() != 3 or self.query.shape[1] != self.memory.heads:
            raise ValueError(
                f"query: must be [T, {self.memory.heads}, d], got {list(self.query.shape)}"
            )

    @property
    def visible(self) -> Tensor | None:
        """Mask bool [1 or H, n] of the rows that the memory's bias does not hide; None = all."""
        bias = self.memory.bias
        if bias is None or not bool((bias == -math.inf).any()):
            return None
        return (bias > -math.inf).reshape(-1, len(self.memory))

    def attend(self, *, temperature: float = 1.0, hard: bool = False) -> Attention:
        """Attend over every row: weights [T, H, n], context [T, H, d_v]."""
        bias = self.memory.bias
        found = attend(
            self.query.transpose(0, 1),  # (H, T, d_k)
            self.memory.keys.transpose(0, 1),
            self.memory.values.transpose(0, 1),
            bias=bias if bias is None else bias[..., None, :],
            score=self.score,
            temperature=temperature,
            hard=hard,
        )
        return Attention(*(part.transpose(0, 1) for part in found))

    def attend_rows(
        self, rows: Tensor, *, temperature: float = 1.0, hard: bool = False
    ) -> Attention:
        """Attend over rows [T, H, k], -1 = none: weights [T, H, k], context [T, H, d_v]."""
        keys, bias, present = self._gather(rows)
        found = attend(
            self.query[:, :, None],  # (T, H, 1, d_k)
            keys,
            self.memory.values[rows.clamp(min=0), self._heads],
            bias=bias,
            visible=present,
            score=self.score,
            temperature=temperature,
            hard=hard,
        )
        return Attention(*(part[:, :, 0] for part in found))

    def logits_of_each(self, rows: Tensor) -> Tensor:
        """Compute the logits [T, H, k] of rows [T, H, k]; -inf where hidden, and for -1."""
        keys, bias, present = self._gather(rows)
        query = self.query[:, :, None]
        return logits(query, keys, bias=bias, visible=present, score=self.score)[:, :, 0]

    def logits_of_all(self, rows: Tensor) -> Tensor:
        """Compute the logits [T, H, m] of the same rows [m] for every target; -inf where hidden."""
        bias = self.memory.bias
        return logits(
            self.query.transpose(0, 1),
            self.memory.keys[rows].transpose(0, 1),
            bias=bias if bias is None else bias[..., None, rows],
            score=self.score,
        ).transpose(0, 1)

    @property
    def _heads(self) -> Tensor:
        """Indices [H, 1] of the heads, beside which rows [..., H, k] index a memory."""
        return torch.arange(self.memory.heads, device=self.query.device)[:, None]

    def _gather(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gather keys [T, H, k, d_k], bias and presence [T, H, 1, k] of rows [T, H, k]."""
        memory, index, bias = self.memory, rows.clamp(min=0), self.memory.bias
        if bias is not None:
            bias = bias[index] if bias.dim() == 1 else bias[self._heads, index]
            bias = bias[:, :, None]
        return memory.keys[index, self._heads], bias, (rows >= 0)[:, :, None]
