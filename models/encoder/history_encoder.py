"""The history encoder: causal self-attention over recent events, in gated blocks.

`NumpyEncoder` is a NumPy version of `HistoryEncoder.append` for a single event: the matrix products
of one event are so small that torch's call overhead exceeds their run time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from models.encoder.causal_attention import causal_attention, causal_buckets
from models.encoder.event_bias import (
    AGE_BUCKETS,
    AGE_EDGES,
    POSITION_BUCKET_OF,
    RecencyBias,
    age_bucket,
    gather_bias,
    recency_bucket,
)

_POOL = 1 << 22  # mask entries


class PooledDropout(nn.Module):
    """Dropout whose masks start at random offsets of one pool; the identity in eval mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._pool: Tensor | None = None

    def redraw(self) -> None:
        self._pool = None

    def forward(self, x: Tensor) -> Tensor:
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
        """Add attention and then the feed-forward network to the residual stream [B, L, dim].

        context [H, B, L, d]; gate [B, L, dim], before the sigmoid.
        """
        merged = context.permute(1, 2, 0, 3).reshape(x.shape)
        x = x + self.drop(torch.sigmoid(gate) * self.out(merged))
        projected = self.feed(self.norm_feed(x))
        left, right, feed_gate = projected.split([self.hidden, self.hidden, self.dim], -1)
        added: Tensor = self.drop(torch.sigmoid(feed_gate) * self.down(silu(left) * right))
        return x + added

    def forward(self, x: Tensor, bucket: Tensor) -> Tensor:
        """Run the block over whole windows [B, L, dim]; `bucket` as from `causal_buckets`."""
        normed = self.norm_attention(x)
        queries, gate = self.queries_gates(normed)
        keys, values = self.keys_values(normed)
        table = self.recency.table()
        return self.add_outputs(x, causal_attention(queries, keys, values, table, bucket), gate)

    def step(self, x: Tensor, normed: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Run the block for the newest events over cached keys and values.

        x and normed, the stream after `norm_attention`, [B, n, dim]; keys and values [H, B, N, d];
        bias on the scores [H, B, n, N], -inf hides a key.
        """
        queries, gate = self.queries_gates(normed)
        return self.add_outputs(x, attend_cached(queries, keys, values, bias), gate)


def attend_cached(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attend from new queries [..., n, d] over cached keys and values [..., N, d]: [..., n, d].

    bias [..., n, N], -inf hides.
    """
    scores = (query * keys.shape[-1] ** -0.5) @ keys.mT + bias
    return torch.softmax(scores, -1) @ values


NO_REQUEST_TIME = -(2**63)  # stands for a request whose time is unknown
GAP_SCALE = 0.2  # scale of the embedding of the gap to the previous event


class EncoderCache(NamedTuple):
    """KV cache of one user's events, and their states. Append-only; never written to."""

    keys: Tensor  # [blocks, H, n, d]
    values: Tensor  # [blocks, H, n, d]
    timestamps: Tensor  # int64 [n] microseconds
    states: Tensor  # [n, dim]

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


class HistoryEncoder(nn.Module):
    """Encodes each event of a history, in the context of those before it, into a state.

    Positions are relative, and times enter as gaps between events. A request time changes no
    state: it enters only the user state (`at_request`), so that caches are append-only.
    """

    def __init__(self, dim: int, heads: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.gap = nn.Embedding(AGE_BUCKETS, dim)
        self.request_gap = nn.Embedding(AGE_BUCKETS + 1, dim)  # the last row: no request time
        nn.init.zeros_(self.gap.weight)
        nn.init.zeros_(self.request_gap.weight)
        self.norm_in = nn.LayerNorm(dim)
        self.drop = PooledDropout(dropout)
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads, self.drop) for _ in range(blocks))
        self.norm_out = nn.LayerNorm(dim)

    def forward(self, events: Tensor, timestamps: Tensor) -> Tensor:
        """Compute the state of every event, [B, L, dim].

        events [B, L, dim] are input vectors, oldest first, timestamps [B, L] int64 microseconds.
        Padding may only follow the events, from which causality hides it.
        """
        x = self._input(events, torch.diff(timestamps, dim=1, prepend=timestamps[:, :1]))
        bucket = causal_buckets(timestamps, timestamps)
        for block in self._blocks():
            x = block(x, bucket)
        states: Tensor = self.norm_out(x)
        return states

    def forward_gated(self, events: Tensor, timestamps: Tensor, gates: Tensor) -> Tensor:
        """Compute the states [n, dim] of a history [n, dim] whose events have gates [n],
        differentiably.

        Gates of 1 change nothing, and a single gate of 0 gives the other events the states that
        they have in the history without its event. In every block log g_j is added to the scores of
        event j, but for its own query. To the degree 1 - g_j, earlier events are one place nearer
        to later ones, and the gap of the next event begins at the previous one.
        """
        times, missing = timestamps[None], 1 - gates
        x = self._input(events[None], torch.diff(times, prepend=times[:, :1]))
        # Without its previous event; without the first one, the second has no gap.
        from_second = times - torch.cat([times[:, :2], times[:, :-2]], 1)
        wider = self._input(events[None], from_second)
        x = x + pad(missing[:-1], (1, 0))[:, None] * (wider - x)
        position = torch.arange(len(timestamps))
        distance, age = position[:, None] - position, timestamps[:, None] - timestamps
        bucket, nearer = recency_bucket(torch.stack([distance, distance - 1]), age)  # (n, n) each
        up_to = missing.cumsum(0)
        between = (up_to - missing)[:, None] - up_to  # missing between the query and the key
        hidden = gates.log().expand_as(age).masked_fill(distance == 0, 0.0)
        hidden = hidden.masked_fill(distance < 0, -torch.inf)
        for block in self._blocks():
            normed = block.norm_attention(x)
            keys, values = block.keys_values(normed)
            table = block.recency.table()
            bias = gather_bias(bucket, table)
            bias = bias + between * (gather_bias(nearer, table) - bias) + hidden
            x = block.step(x, normed, keys, values, bias[:, None])
        states: Tensor = self.norm_out(x)[0]
        return states

    def at_request(self, states: Tensor, timestamps: Tensor, request_times: Tensor) -> Tensor:
        """Compute user states [..., dim]: the newest event's state and the time since.

        states [..., dim] and timestamps [...] are of the newest events, request_times [...] int64
        microseconds or `NO_REQUEST_TIME`.
        """
        given = request_times != NO_REQUEST_TIME
        gap = age_bucket(torch.where(given, request_times, timestamps) - timestamps)
        embedded: Tensor = self.request_gap(torch.where(given, gap, AGE_BUCKETS))
        return states + embedded

    # ------------------------------------------------------------------ incremental, per user

    def empty_cache(self) -> EncoderCache:
        first = self._blocks()[0]
        weight = first.out.weight
        empty = weight.new_zeros(len(self.blocks), first.heads, 0, first.dim // first.heads)
        times = torch.zeros(0, dtype=torch.int64, device=weight.device)
        return EncoderCache(empty, empty, times, weight.new_zeros(0, first.dim))

    def append(self, cache: EncoderCache, events: Tensor, timestamps: Tensor) -> EncoderCache:
        """Return the cache with more events, oldest first, computing only the new ones.

        Input vectors [n, dim], and timestamps in int64 microseconds [n].
        """
        if not len(timestamps):
            return cache
        return self.branch(cache, len(cache), events[None], timestamps[None])[0]

    def branch(
        self, cache: EncoderCache, shared: int, events: Tensor, timestamps: Tensor
    ) -> list[EncoderCache]:
        """Return the caches of B histories that continue the first `shared` events of a cached one.

        events [B, n, dim] are input vectors, n at least 1, timestamps int64 microseconds [B, n].
        """
        each = (-1, -1, len(events), -1, -1)
        keys, values, times, states = self._append(
            cache.keys[:, :, None, :shared].expand(each),
            cache.values[:, :, None, :shared].expand(each),
            cache.timestamps[:shared].expand(len(events), -1),
            events,
            timestamps,
        )
        shared_states = cache.states[:shared]
        return [
            EncoderCache(
                keys[:, :, row], values[:, :, row], times[row],
                torch.cat([shared_states, states[row]]),
            )
            for row in range(len(events))
        ]  # fmt: skip

    def _append(
        self, keys: Tensor, values: Tensor, before: Tensor, events: Tensor, timestamps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Append events [B, n, dim] to the caches of B histories.

        keys and values [blocks, H, B, N, d]; `before` [B, N] and `timestamps` [B, n] int64
        microseconds. Returns keys, values and times of N + n events, and the states [B, n, dim] of
        the new ones.
        """
        old = before.shape[1]
        times = torch.cat([before, timestamps], 1)
        gaps = torch.diff(timestamps, dim=1, prepend=times[:, max(0, old - 1), None])
        x = self._input(events, gaps)
        position = torch.arange(times.shape[1], device=times.device)
        distance = position[old:, None] - position
        bucket = recency_bucket(distance, timestamps[:, :, None] - times[:, None])  # (B, n, N + n)
        shape = (*keys.shape[:3], times.shape[1], keys.shape[4])
        all_keys, all_values = keys.new_empty(shape), values.new_empty(shape)
        all_keys[..., :old, :], all_values[..., :old, :] = keys, values
        for number, block in enumerate(self._blocks()):
            normed = block.norm_attention(x)
            block_keys, block_values = all_keys[number], all_values[number]
            block_keys[:, :, old:], block_values[:, :, old:] = block.keys_values(normed)
            bias = gather_bias(bucket, block.recency.table())
            if len(distance) > 1:
                bias = bias.masked_fill(distance < 0, -torch.inf)
            x = block.step(x, normed, block_keys, block_values, bias)
        return all_keys, all_values, times, self.norm_out(x)

    def _input(self, events: Tensor, gaps: Tensor) -> Tensor:
        """The first block's input: events [B, L, dim], microseconds before them [B, L]."""
        x: Tensor = self.drop(self.norm_in(events + GAP_SCALE * self.gap(age_bucket(gaps))))
        return x

    def _blocks(self) -> list[EncoderBlock]:
        return [block for block in self.blocks if isinstance(block, EncoderBlock)]


Array = NDArray[np.float32]

# The position part of the bucket of each distance, up to the first in the last bucket.
_POSITIONS = POSITION_BUCKET_OF.numpy() * AGE_BUCKETS


class _Norm:
    def __init__(self, norm: nn.LayerNorm) -> None:
        self.weight, self.bias, self.eps = _array(norm.weight), _array(norm.bias), norm.eps

    def __call__(self, x: Array) -> Array:
        centred = x - np.add.reduce(x) / len(x)  # `mean` has four times the overhead
        normed = centred * (1 / np.sqrt(centred @ centred / len(x) + self.eps))
        scaled: Array = normed * self.weight + self.bias
        return scaled


class _Block:
    """An encoder block's parameters: W [out, in], b [out]."""

    def __init__(self, block: EncoderBlock) -> None:
        self.norm, self.norm_feed = _Norm(block.norm_attention), _Norm(block.norm_feed)
        self.key_value, self.out = _array(block.key_value.weight), _array(block.out.weight)
        self.query_gate, self.query_gate_bias = _affine(block.query_gate)
        self.feed, self.feed_bias = _affine(block.feed)
        self.down = _array(block.down.weight)
        self.table = _array(block.recency.table())  # [H, buckets]

    def attention_output(
        self, normed: Array, keys: Array, values: Array, bucket: NDArray[np.int64]
    ) -> Array:
        """Return the gated output of the attention, [dim]."""
        both = self.query_gate @ normed + self.query_gate_bias
        heads, _, size = keys.shape
        query, gate = both[: heads * size].reshape(heads, size), both[heads * size :]
        context = attend_one(query, keys, values, self.table.take(bucket, 1)).reshape(-1)
        return _sigmoid(gate) * (self.out @ context)

    def feed_forward(self, x: Array) -> Array:
        projected = self.feed @ self.norm_feed(x) + self.feed_bias
        hidden = self.down.shape[1]
        left, right = projected[:hidden], projected[hidden : 2 * hidden]
        gate = projected[2 * hidden :]
        return x + _sigmoid(gate) * (self.down @ (left * _sigmoid(left) * right))


class NumpyEncoder:
    """Appends single events to an encoder cache; holds a copy of the trained weights."""

    def __init__(self, encoder: HistoryEncoder) -> None:
        self._norm_in, self._norm_out = _Norm(encoder.norm_in), _Norm(encoder.norm_out)
        self._gap = GAP_SCALE * _array(encoder.gap.weight)
        self._edges = AGE_EDGES.numpy()
        self._blocks = [_Block(each) for each in encoder.blocks if isinstance(each, EncoderBlock)]

    def append(self, cache: EncoderCache, event: Tensor, timestamp: int) -> EncoderCache:
        """Return the cache with one more event: its input vector [dim], and microseconds."""
        blocks, heads, old, size = cache.keys.shape
        shape = (blocks, heads, old + 1, size)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        keys[:, :, :old], values[:, :, :old] = cache.keys.numpy(), cache.values.numpy()
        times = np.empty(old + 1, np.int64)
        times[:old], times[old] = cache.timestamps.numpy(), timestamp
        ages = np.searchsorted(self._edges, timestamp - times, side="right")  # [old + 1]
        bucket = _POSITIONS.take(np.arange(old, -1, -1), mode="clip") + ages
        x: Array = self._norm_in(event.numpy() + self._gap[ages[old - 1] if old else 0])
        for number, block in enumerate(self._blocks):
            normed = block.norm(x)
            own = (block.key_value @ normed).reshape(2, heads, size)
            keys[number, :, old], values[number, :, old] = own
            context = block.attention_output(normed, keys[number], values[number], bucket)
            x = block.feed_forward(x + context)
        states = np.empty((old + 1, len(x)), np.float32)
        states[:old], states[old] = cache.states.numpy(), self._norm_out(x)
        return EncoderCache(*map(torch.from_numpy, (keys, values, times, states)))


def attend_one(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Attend from one query [H, d] over keys and values [H, n, d] with bias [H, n]: [H, d]."""
    scores: Array = (keys @ query[:, :, None])[:, :, 0] * query.shape[1] ** -0.5 + bias
    scores -= np.maximum.reduce(scores, 1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, 1, keepdims=True)
    return (scores[:, None] @ values)[:, 0]


def _sigmoid(x: Array) -> Array:
    y: Array = 0.5 * np.tanh(0.5 * x) + 0.5  # does not overflow
    return y


def _affine(layer: nn.Linear) -> tuple[Array, Array]:
    return _array(layer.weight), _array(layer.bias)


def _array(weight: Tensor) -> Array:
    return weight.detach().cpu().numpy().astype(np.float32)
