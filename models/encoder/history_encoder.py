"""The history encoder: causal self-attention over recent events, queried at a request time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.encoder.causal_attention import FUTURE_BUCKET
from models.encoder.dropout import PooledDropout
from models.encoder.encoder_block import EncoderBlock
from models.encoder.recency_bias import AGE_BUCKETS, age_bucket, gather_bias, recency_bucket

NO_REQUEST_TIME = -(2**63)  # stands for a request whose time is unknown
GAP_SCALE = 0.2  # scale of the embedding of the gap to the previous event


class EncoderCache(NamedTuple):
    """KV cache of one user's events. Append-only; its tensors are never written to."""

    keys: Tensor  # [blocks, H, n, d]
    values: Tensor  # [blocks, H, n, d]
    timestamps: Tensor  # int64 [n] microseconds
    newest: Tensor  # [dim] the newest event's residual stream before the last block

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(part.nbytes for part in self)


class HistoryEncoder(nn.Module):
    """Encodes each prefix of a history, together with a request time, into a user state.

    Positions are relative, and times enter as gaps between events. The request time enters the
    queries of the last block alone, so keys and values of past events never change.
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

    def forward(self, events: Tensor, timestamps: Tensor, request_times: Tensor) -> Tensor:
        """Compute the user state of every prefix.

        Args:
            events: input vectors of the events, oldest first, [B, L, dim]; padding may only
                follow the events, from which causality hides it.
            timestamps: int64 microseconds [B, L].
            request_times: int64 microseconds [B, L] for each prefix, or `NO_REQUEST_TIME`.

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
        given = request_times != NO_REQUEST_TIME
        bucket = own
        if bool(given.any()):
            bucket = buckets(torch.where(given, request_times, timestamps))
        x = last(x + self._request_embedding(request_times, timestamps), x, bucket)
        states: Tensor = self.norm_out(x)
        return states

    # ------------------------------------------------------------------ incremental, per user

    def empty_cache(self) -> EncoderCache:
        """Return the cache of a user without events."""
        first = self._blocks()[0]
        weight = first.out.weight
        empty = weight.new_zeros(len(self.blocks), first.heads, 0, first.dim // first.heads)
        times = torch.zeros(0, dtype=torch.int64, device=weight.device)
        return EncoderCache(empty, empty, times, weight.new_zeros(first.dim))

    def append(self, cache: EncoderCache, events: Tensor, timestamps: Tensor) -> EncoderCache:
        """Return the cache with more events, oldest first, computing the new events alone.

        Input vectors [n, dim], and timestamps in int64 microseconds [n].
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
        """Compute the user state h [dim] of all cached events; zero if there are none."""
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
        """Compute the user states of several histories with a common cached prefix.

        Args:
            cache: of any history with that prefix.
            shared: length of the prefix.
            events: input vectors of each continuation, oldest first, [B, n, dim], n at least 1.
            timestamps: int64 microseconds [B, n].
            request_times: int64 microseconds [B], or `NO_REQUEST_TIME`.

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
        """Append events to the caches of B histories.

        Args:
            keys: cached, [blocks, H, B, N, d].
            values: cached, likewise.
            before: int64 microseconds of the cached events, [B, N].
            events: [B, n, dim].
            timestamps: int64 microseconds [B, n].

        Returns:
            tuple: keys and values [blocks, H, B, N + n, d]; times [B, N + n]; the residual stream
            of the new events before the last block, [B, n, dim].
        """
        old = before.shape[1]
        times = torch.cat([before, timestamps], 1)
        x = self._input(events, timestamps, times[:, max(0, old - 1), None])
        position = torch.arange(times.shape[1], device=times.device)
        distance = position[old:, None] - position
        bucket = recency_bucket(distance, timestamps[:, :, None] - times[:, None])  # (B, n, N + n)
        shape = (*keys.shape[:3], times.shape[1], keys.shape[4])
        all_keys, all_values = keys.new_empty(shape), values.new_empty(shape)
        all_keys[..., :old, :], all_values[..., :old, :] = keys, values
        blocks = self._blocks()
        for number, block in enumerate(blocks):
            normed = block.norm_attention(x)
            block_keys, block_values = all_keys[number], all_values[number]
            block_keys[:, :, old:], block_values[:, :, old:] = block.keys_values(normed)
            if number < len(blocks) - 1:
                bias = gather_bias(bucket, block.recency.table())
                if len(distance) > 1:
                    bias = bias.masked_fill(distance < 0, -torch.inf)
                x = block.step(x, normed, block_keys, block_values, bias)
        return all_keys, all_values, times, x

    def _user_states(
        self, keys: Tensor, values: Tensor, times: Tensor, newest: Tensor, request_times: Tensor
    ) -> Tensor:
        """Compute the user states [B, dim] of B histories.

        Args:
            keys: of the last block, [H, B, N, d].
            values: likewise.
            times: int64 microseconds [B, N].
            newest: the newest event's residual stream before the last block, [B, dim].
            request_times: int64 microseconds [B], or `NO_REQUEST_TIME`.
        """
        last = self._blocks()[-1]
        latest = times[:, -1]
        distance = torch.arange(times.shape[1] - 1, -1, -1, device=times.device)
        at = torch.where(request_times == NO_REQUEST_TIME, latest, request_times)
        bucket = recency_bucket(distance, at[:, None] - times)  # (B, N)
        bias = gather_bias(bucket, last.recency.table())[:, :, None]  # (H, B, 1, N)
        x = (newest + self._request_embedding(request_times, latest))[:, None]
        x = last.step(x, last.norm_attention(x), keys, values, bias)
        states: Tensor = self.norm_out(x)[:, 0]
        return states

    def _input(self, events: Tensor, timestamps: Tensor, before: Tensor) -> Tensor:
        """Return the first block's input; `before` [B, 1] is the time of the previous event."""
        gap = torch.diff(timestamps, dim=1, prepend=before)
        x: Tensor = self.drop(self.norm_in(events + GAP_SCALE * self.gap(age_bucket(gap))))
        return x

    def _request_embedding(self, request_times: Tensor, timestamps: Tensor) -> Tensor:
        """Embed the gap between the newest event and the request, [..., dim]."""
        given = request_times != NO_REQUEST_TIME
        gap = age_bucket(torch.where(given, request_times, timestamps) - timestamps)
        embedded: Tensor = self.request_gap(torch.where(given, gap, AGE_BUCKETS))
        return embedded

    def _blocks(self) -> list[EncoderBlock]:
        return [block for block in self.blocks if isinstance(block, EncoderBlock)]
