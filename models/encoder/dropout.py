"""Dropout whose masks are slices of a pool drawn once: the generator is slower than the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_POOL = 1 << 22  # mask entries


class PooledDropout(nn.Module):
    """Dropout in training, nothing otherwise; masks start at random places of one drawn pool."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._pool: Tensor | None = None

    def redraw(self) -> None:
        """Draw another pool at the next use."""
        self._pool = None

    def forward(self, x: Tensor) -> Tensor:
        """X with each entry zeroed with probability `rate`, the others scaled to keep the mean."""
        if not self.training or not self.rate:
            return x
        if self._pool is None or self._pool.device != x.device:
            kept = torch.rand(_POOL, device=x.device) >= self.rate
            self._pool = kept.float() / (1 - self.rate)
        count = x.numel()
        start = int(torch.randint(_POOL, ()))
        mask = self._pool[start : start + count]
        while len(mask) < count:  # on from the pool's beginning
            mask = torch.cat([mask, self._pool[: count - len(mask)]])
        return x * mask.view(x.shape).to(x.dtype)
