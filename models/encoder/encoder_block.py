"""One block of the history encoder: gated attention followed by a gated SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from models.encoder.causal_attention import causal_attention
from models.encoder.recency_bias import RecencyBias


class EncoderBlock(nn.Module):
    """Pre-norm gated attention, then a gated SwiGLU (LiGR, Borisyuk et al. 2025).

    x += σ(W_g n + b) ⊙ W_o attention(n) for n = LayerNorm(x), then the same gate around the
    feed-forward network.
    """

    def __init__(self, dim: int, heads: int, drop: nn.Module) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.hidden = 16 * max(1, round(dim * 8 / 3 / 16))
        self.norm_attention = nn.LayerNorm(dim)
        self.norm_feed = nn.LayerNorm(dim)
        self.query_gate = nn.Linear(dim, 2 * dim)  # W_Q and the gate
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed = nn.Linear(dim, 2 * self.hidden + dim)  # SwiGLU's two halves and the gate
        self.down = nn.Linear(self.hidden, dim, bias=False)
        for layer in (self.query_gate, self.key_value, self.out, self.feed, self.down):
            nn.init.normal_(layer.weight, std=0.5 / layer.in_features**0.5)
        nn.init.zeros_(self.query_gate.bias)
        nn.init.zeros_(self.feed.bias)
        self.recency = RecencyBias(heads)
        self.drop = drop

    def keys_values(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Project a normed stream [B, L, dim] to keys and values, [H, B, L, d] each."""
        batch, length, _ = normed.shape
        both = self.key_value(normed)
        keys, values = both.view(batch, length, 2, self.heads, -1).permute(2, 3, 0, 1, 4)
        return keys, values

    def queries_gates(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Project a normed stream to queries [H, B, L, d] and the attention's gate [B, L, dim]."""
        batch, length, dim = normed.shape
        both = self.query_gate(normed)
        queries = both[..., :dim].reshape(batch, length, self.heads, -1).permute(2, 0, 1, 3)
        return queries, both[..., dim:]

    def add_outputs(self, x: Tensor, context: Tensor, gate: Tensor) -> Tensor:
        """Add the attention's output and then the feed-forward network to the residual stream.

        Args:
            x: the residual stream, [B, L, dim].
            context: the attention's context, [H, B, L, d].
            gate: before the sigmoid, [B, L, dim].
        """
        merged = context.permute(1, 2, 0, 3).reshape(x.shape)
        x = x + self.drop(torch.sigmoid(gate) * self.out(merged))
        projected = self.feed(self.norm_feed(x))
        left, right, feed_gate = projected.split([self.hidden, self.hidden, self.dim], -1)
        added: Tensor = self.drop(torch.sigmoid(feed_gate) * self.down(silu(left) * right))
        return x + added

    def forward(self, x: Tensor, bucket: Tensor) -> Tensor:
        """Run the block over whole windows [B, L, dim].

        bucket: int32 [B, L, L], `FUTURE_BUCKET` above the diagonal.
        """
        normed = self.norm_attention(x)
        queries, gate = self.queries_gates(normed)
        keys, values = self.keys_values(normed)
        table = self.recency.table()
        return self.add_outputs(x, causal_attention(queries, keys, values, table, bucket), gate)

    def step(self, x: Tensor, normed: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Run the block for the newest events over cached keys and values.

        Args:
            x: the stream of the newest events, [B, n, dim].
            normed: the stream after `norm_attention`.
            keys: [H, B, N, d].
            values: [H, B, N, d].
            bias: on the scores, [H, B, n, N]; -inf hides a key.
        """
        queries, gate = self.queries_gates(normed)
        return self.add_outputs(x, attend_cached(queries, keys, values, bias), gate)


def attend_cached(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attend from new queries [..., n, d] over cached keys and values [..., N, d]: [..., n, d].

    bias [..., n, N], -inf hides.
    """
    scores = (query * keys.shape[-1] ** -0.5) @ keys.mT + bias
    return torch.softmax(scores, -1) @ values
