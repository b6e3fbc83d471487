"""Dropout with masks sliced from a pre-drawn pool, since the generator is slower than the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_POOL = 1 << 22  # mask entries


class PooledDropout(nn.Module):
    """Dropout whose masks start at random offsets of one pool; the identity in eval mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._pool: Tensor | None = None

    def redraw(self) -> None:
        """Discard the pool; the next use draws another."""
        self._pool = None

    def forward(self, x: Tensor) -> Tensor:
        """Zero each entry with probability `rate` and scale the others to keep the mean."""
        if not self.training or not self.rate:
            return x
        if self._pool is None or self._pool.device != x.device:
            keep = torch.rand(_POOL, device=x.device) >= self.rate
            self._pool = keep.float() / (1 - self.rate)
        count = x.numel()
        start = int(torch.randint(_POOL, ()))
        mask = self._pool[start : start + count]
        while len(mask) < count:  # wrap around
            mask = torch.cat([mask, self._pool[: count - len(mask)]])
        return x * mask.view(x.shape).to(x.dtype)
