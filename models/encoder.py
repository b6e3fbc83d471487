"""The history encoder: causal self-attention over recent events."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.recency import AGE_BUCKETS, RecencyBias, age_bucket


class EncoderBlock(nn.Module):
    """Pre-norm causal self-attention with recency biases, then a feed-forward network."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(dim)
        self.norm_feed = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.recency = RecencyBias(heads)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, distance: Tensor, age: Tensor, visible: Tensor) -> Tensor:
        """One block.

        Args:
            x: [B, L, dim].
            distance: [L, L], query position minus key position.
            age: [B, L, L], query time minus key time in microseconds.
            visible: [L, L], True where the key is not in the query's future.
        """
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, L, d)
        bias = self.recency(distance, age, visible)  # (B, H, L, L)
        # Every position sees itself, so no row of the fused kernel is fully masked.
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, dim)))
        fed: Tensor = x + self.drop(self.feed(self.norm_feed(x)))
        return fed


class HistoryEncoder(nn.Module):
    """h_t, a summary of the events up to t, from self-attention that never looks ahead.

    Positions are relative and times enter as the events' own gaps, so what is computed of past
    events does not change when one is appended.
    """

    def __init__(self, dim: int, heads: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.gap = nn.Embedding(AGE_BUCKETS, dim)
        nn.init.zeros_(self.gap.weight)
        self.norm_in = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads, dropout) for _ in range(blocks))
        self.norm_out = nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, events: Tensor, timestamps: Tensor) -> Tensor:
        """Summaries of every prefix.

        Args:
            events: item vectors of the events, oldest first, [B, L, dim]; padding may only
                follow the events (causality hides it from them).
            timestamps: int64 microseconds [B, L].

        Returns:
            Tensor: [B, L, dim], h_t for each position t.
        """
        length = events.shape[1]
        position = torch.arange(length, device=events.device)
        distance = position[:, None] - position  # (L, L)
        age = timestamps[:, :, None] - timestamps[:, None, :]  # (B, L, L)
        gap = torch.diff(timestamps, dim=1, prepend=timestamps[:, :1])
        x = self.drop(self.norm_in(events + 0.2 * self.gap(age_bucket(gap))))
        for block in self.blocks:
            x = block(x, distance, age, distance >= 0)
        summary: Tensor = self.norm_out(x)
        return summary
