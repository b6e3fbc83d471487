"""The history encoder: gated causal self-attention over recent events, asked at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from models.encoder.causal_attention import FUTURE_BUCKET, causal_attention
from models.encoder.dropout import PooledDropout
from models.encoder.recency_bias import (
    AGE_BUCKETS,
    RecencyBias,
    age_bucket,
    gather_bias,
    recency_bucket,
)

NO_REQUEST_TIME = -(2**63)  # a request time that is not told
GAP_SCALE = 0.2  # share of the gap to the event before in what is read of an event


class EncoderBlock(nn.Module):
    """Gated attention, then a gated SwiGLU (LiGR, Borisyuk et al. 2025), both before a norm.

    x += σ(W_g n + b) ⊙ W_o attention(n), then the same gate around the feed-forward network.
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
        """Keys and values [H, B, L, d] of a normed stream [B, L, dim]."""
        batch, length, _ = normed.shape
        both = self.key_value(normed)
        keys, values = both.view(batch, length, 2, self.heads, -1).permute(2, 3, 0, 1, 4)
        return keys, values

    def queries_gates(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [H, B, L, d] and the attention's gate [B, L, dim] of a normed stream."""
        batch, length, dim = normed.shape
        both = self.query_gate(normed)
        queries = both[..., :dim].reshape(batch, length, self.heads, -1).permute(2, 0, 1, 3)
        return queries, both[..., dim:]

    def finish(self, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        """The stream after what was attended, [H, B, L, d], and the feed-forward network."""
        merged = mixed.permute(1, 2, 0, 3).reshape(x.shape)
        x = x + self.drop(torch.sigmoid(gate) * self.out(merged))
        fed = self.feed(self.norm_feed(x))
        left, right, feed_gate = fed.split([self.hidden, self.hidden, self.dim], -1)
        passed: Tensor = x + self.drop(torch.sigmoid(feed_gate) * self.down(silu(left) * right))
        return passed

    def forward(self, x: Tensor, source: Tensor, bucket: Tensor) -> Tensor:
        """One block over whole windows.

        Args:
            x: the stream that asks, [B, L, dim].
            source: the stream of the past, [B, L, dim].
            bucket: int32 [B, L, L], `HIDDEN` above the diagonal.
        """
        past = self.norm_attention(source)
        queries, gate = self.queries_gates(past if x is source else self.norm_attention(x))
        keys, values = self.keys_values(past)
        table = self.recency.table()
        return self.finish(x, causal_attention(queries, keys, values, table, bucket), gate)


class EncoderCache(NamedTuple):
    """What the encoder keeps of one user's events: append-only, as a KV cache. Never written to."""

    keys: Tensor  # [blocks, H, n, d]
    values: Tensor  # [blocks, H, n, d]
    timestamps: Tensor  # int64 [n] microseconds
    newest: Tensor  # [dim] the stream of the newest event before the last block

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self)


class HistoryEncoder(nn.Module):
    """A summary of the events up to t as asked at a time, from attention that never looks ahead.

    Positions are relative, times enter as the events' own gaps, and the time of the request enters
    the queries of the last block alone: keys and values of past events never change.
    """

    def __init__(self, dim: int, heads: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.gap = nn.Embedding(AGE_BUCKETS, dim)
        self.request_gap = nn.Embedding(AGE_BUCKETS + 1, dim)  # the last: not told
        nn.init.zeros_(self.gap.weight)
        nn.init.zeros_(self.request_gap.weight)
        self.norm_in = nn.LayerNorm(dim)
        self.drop = PooledDropout(dropout)
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads, self.drop) for _ in range(blocks))
        self.norm_out = nn.LayerNorm(dim)

    def forward(self, events: Tensor, timestamps: Tensor, request_times: Tensor) -> Tensor:
        """Summaries of every prefix.

        Args:
            events: item vectors of the events, oldest first, [B, L, dim]; padding may only
                follow the events (causality hides it from them).
            timestamps: int64 microseconds [B, L].
            asked: int64 microseconds [B, L], when each prefix is asked; `UNTOLD` where nobody says.

        Returns:
            Tensor: [B, L, dim], h_t for each position t.
        """
        length = events.shape[1]
        position = torch.arange(length, device=events.device)
        distance = position[:, None] - position  # (L, L)
        future = distance < 0

        def buckets(at: Tensor) -> Tensor:
            age = at[:, :, None] - timestamps[:, None, :]  # (B, L, L)
            return recency_bucket(distance, age).masked_fill_(future, FUTURE_BUCKET)

        x = self._input(events, timestamps, timestamps[:, :1])
        own = buckets(timestamps)
        *before, last = self._blocks()
        for block in before:
            x = block(x, x, own)
        told = request_times != NO_REQUEST_TIME
        bucket = buckets(torch.where(told, request_times, timestamps)) if bool(told.any()) else own
        x = last(x + self._request_embedding(request_times, timestamps), x, bucket)
        summary: Tensor = self.norm_out(x)
        return summary

    # ------------------------------------------------------------------ one user, step by step

    def empty_cache(self) -> EncoderCache:
        """The state of a user without events."""
        first = self._blocks()[0]
        weight = first.out.weight
        empty = weight.new_zeros(len(self.blocks), first.heads, 0, first.dim // first.heads)
        times = torch.zeros(0, dtype=torch.int64, device=weight.device)
        return EncoderCache(empty, empty, times, weight.new_zeros(first.dim))

    def append(self, cache: EncoderCache, events: Tensor, timestamps: Tensor) -> EncoderCache:
        """The state after more events: the work is that of the new events alone.

        Args:
            state: what was kept of the events before.
            events: item vectors of the new events, oldest first, [n, dim].
            timestamps: int64 microseconds [n].
        """
        if not len(timestamps):
            return cache
        keys, values, times, x = self._append(
            cache.keys[:, :, None],
            cache.values[:, :, None],
            cache.timestamps[None],
            events[None],
            timestamps[None],
        )
        newest = x[0, -1].clone()  # a view would keep the streams of all the new events
        return EncoderCache(keys[:, :, 0], values[:, :, 0], times[0], newest)

    def user_state(self, cache: EncoderCache, request_time: int = NO_REQUEST_TIME) -> Tensor:
        """H [dim] of all events of the state as asked at a time, microseconds; zero without any."""
        if not len(cache):
            return torch.zeros_like(cache.newest)
        times = cache.timestamps[None]
        at = torch.full_like(times[:, -1], request_time)
        keys, values = cache.keys[-1][:, None], cache.values[-1][:, None]
        return self._user_states(keys, values, times, cache.newest[None], at)[0]

    def branch(
        self,
        cache: EncoderCache,
        shared: int,
        events: Tensor,
        timestamps: Tensor,
        request_times: Tensor,
    ) -> Tensor:
        """Summaries of several histories that begin alike: the work is that of what follows.

        Args:
            state: of any history that begins so.
            shared: how many of its first events they share.
            events: item vectors of what follows in each, oldest first, [B, n, dim], n at least 1.
            timestamps: int64 microseconds [B, n].
            asked: int64 microseconds [B], when each is asked; `UNTOLD` where nobody says.

        Returns:
            Tensor: [B, dim].
        """
        each = (-1, -1, len(events), -1, -1)
        keys, values, times, x = self._append(
            cache.keys[:, :, None, :shared].expand(each),
            cache.values[:, :, None, :shared].expand(each),
            cache.timestamps[:shared].expand(len(events), -1),
            events,
            timestamps,
        )
        return self._user_states(keys[-1], values[-1], times, x[:, -1], request_times)

    def _append(
        self, keys: Tensor, values: Tensor, before: Tensor, events: Tensor, timestamps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """More events of B histories.

        Args:
            keys: kept of the events before, [blocks, H, B, N, d].
            values: likewise.
            before: their int64 microseconds [B, N].
            events: [B, n, dim].
            timestamps: int64 microseconds [B, n].

        Returns:
            tuple: keys and values [blocks, H, B, N + n, d]; times [B, N + n]; the stream of the new
            events before the last block, [B, n, dim].
        """
        old = before.shape[1]
        times = torch.cat([before, timestamps], 1)
        x = self._input(events, timestamps, times[:, max(0, old - 1), None])
        position = torch.arange(times.shape[1], device=times.device)
        distance = position[old:, None] - position
        bucket = recency_bucket(distance, timestamps[:, :, None] - times[:, None])  # (B, n, N + n)
        room = (*keys.shape[:3], times.shape[1], keys.shape[4])
        all_keys, all_values = keys.new_empty(room), values.new_empty(room)
        all_keys[..., :old, :], all_values[..., :old, :] = keys, values
        blocks = self._blocks()
        for number, block in enumerate(blocks):
            normed = block.norm_attention(x)
            own_keys, own_values = all_keys[number], all_values[number]
            own_keys[:, :, old:], own_values[:, :, old:] = block.keys_values(normed)
            if number < len(blocks) - 1:
                bias = gather_bias(bucket, block.recency.table())
                if len(distance) > 1:
                    bias = bias.masked_fill(distance < 0, -torch.inf)
                x = _step(block, x, normed, own_keys, own_values, bias)
        return all_keys, all_values, times, x

    def _user_states(
        self, keys: Tensor, values: Tensor, times: Tensor, newest: Tensor, request_times: Tensor
    ) -> Tensor:
        """Summaries [B, dim] of B histories.

        Args:
            keys: of the last block, [H, B, N, d].
            values: likewise.
            times: int64 microseconds [B, N].
            newest: the stream of the newest event before the last block, [B, dim].
            asked: int64 microseconds [B], `UNTOLD` where nobody says.
        """
        last = self._blocks()[-1]
        latest = times[:, -1]
        distance = torch.arange(times.shape[1] - 1, -1, -1, device=times.device)
        age = (
            torch.where(request_times == NO_REQUEST_TIME, latest, request_times)[:, None] - times
        )  # (B, N)
        bias = gather_bias(recency_bucket(distance, age), last.recency.table())  # (H, B, N)
        x = (newest + self._request_embedding(request_times, latest))[:, None]
        asking = last.norm_attention(x)
        step = _step(last, x, asking, keys, values, bias[:, :, None])
        summary: Tensor = self.norm_out(step)[:, 0]
        return summary

    def _input(self, events: Tensor, timestamps: Tensor, before: Tensor) -> Tensor:
        """What enters the first block; `before` [B, 1] is the time of the event before."""
        gap = torch.diff(timestamps, dim=1, prepend=before)
        read: Tensor = self.drop(self.norm_in(events + GAP_SCALE * self.gap(age_bucket(gap))))
        return read

    def _request_embedding(self, request_times: Tensor, timestamps: Tensor) -> Tensor:
        """What the time of the request adds to a query."""
        told = request_times != NO_REQUEST_TIME
        waited = age_bucket(torch.where(told, request_times, timestamps) - timestamps)
        added: Tensor = self.request_gap(torch.where(told, waited, AGE_BUCKETS))
        return added

    def _blocks(self) -> list[EncoderBlock]:
        return [block for block in self.blocks if isinstance(block, EncoderBlock)]


def _step(
    block: EncoderBlock, x: Tensor, normed: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> Tensor:
    """One block for the newest events [B, n, dim] over keys and values [H, B, N, d].

    bias [H, B, n, N], -inf hides.
    """
    queries, gate = block.queries_gates(normed)
    return block.finish(x, attend_cached(queries, keys, values, bias), gate)


def attend_cached(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attend from new queries [..., n, d] over cached keys and values [..., N, d]: [..., n, d].

    bias [..., n, N], -inf hides.
    """
    scores = (query @ keys.mT) / keys.shape[-1] ** 0.5 + bias
    return torch.softmax(scores, -1) @ values
