"""The history encoder: causal self-attention over recent events."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from models.encoder.causal_attention import causal_buckets
from models.encoder.dropout import PooledDropout
from models.encoder.encoder_block import EncoderBlock
from models.encoder.recency_bias import AGE_BUCKETS, age_bucket, gather_bias, recency_bucket

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
        """Size of the tensors in bytes."""
        return sum(part.nbytes for part in self)


class HistoryEncoder(nn.Module):
    """Encodes each event of a history, in the context of those before it, into a state.

    Positions are relative, and times enter as gaps between events. A request time changes no
    state: it enters the user state alone (`at_request`), so that caches are append-only.
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
        """Compute the state of every event.

        Args:
            events: input vectors of the events, oldest first, [B, L, dim]; padding may only
                follow the events, from which causality hides it.
            timestamps: int64 microseconds [B, L].

        Returns:
            Tensor: [B, L, dim].
        """
        x = self._input(events, torch.diff(timestamps, dim=1, prepend=timestamps[:, :1]))
        bucket = causal_buckets(timestamps, timestamps)
        for block in self._blocks():
            x = block(x, bucket)
        states: Tensor = self.norm_out(x)
        return states

    def forward_gated(self, events: Tensor, timestamps: Tensor, gates: Tensor) -> Tensor:
        """Compute the states of one history whose events have gates, by differentiable operations.

        Gates of 1 change nothing, and a single gate of 0 gives the other events the states that
        they have in the history without its event. In every block log g_j is added to the scores of
        event j, but for its own query. To the degree 1 - g_j, earlier events are one place nearer
        to later ones, and the gap of the next event begins at the previous one.

        Args:
            events: input vectors, [n, dim].
            timestamps: int64 microseconds [n].
            gates: [n].

        Returns:
            Tensor: [n, dim].
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
        """Compute user states: the newest event's state plus an embedding of the time since.

        Args:
            states: of the newest events, [..., dim].
            timestamps: of these events, int64 microseconds [...].
            request_times: int64 microseconds [...], or `NO_REQUEST_TIME`.

        Returns:
            Tensor: [..., dim].
        """
        given = request_times != NO_REQUEST_TIME
        gap = age_bucket(torch.where(given, request_times, timestamps) - timestamps)
        embedded: Tensor = self.request_gap(torch.where(given, gap, AGE_BUCKETS))
        return states + embedded

    # ------------------------------------------------------------------ incremental, per user

    def empty_cache(self) -> EncoderCache:
        """Return the cache of a user without events."""
        first = self._blocks()[0]
        weight = first.out.weight
        empty = weight.new_zeros(len(self.blocks), first.heads, 0, first.dim // first.heads)
        times = torch.zeros(0, dtype=torch.int64, device=weight.device)
        return EncoderCache(empty, empty, times, weight.new_zeros(0, first.dim))

    def append(self, cache: EncoderCache, events: Tensor, timestamps: Tensor) -> EncoderCache:
        """Return the cache with more events, oldest first, computing the new events alone.

        Input vectors [n, dim], and timestamps in int64 microseconds [n].
        """
        if not len(timestamps):
            return cache
        return self.branch(cache, len(cache), events[None], timestamps[None])[0]

    def branch(
        self, cache: EncoderCache, shared: int, events: Tensor, timestamps: Tensor
    ) -> list[EncoderCache]:
        """Return the caches of several histories with a common cached prefix.

        Args:
            cache: of any history with that prefix.
            shared: length of the prefix.
            events: input vectors of each continuation, oldest first, [B, n, dim], n at least 1.
            timestamps: int64 microseconds [B, n].
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
        """Append events to the caches of B histories.

        Args:
            keys: cached, [blocks, H, B, N, d].
            values: cached, likewise.
            before: int64 microseconds of the cached events, [B, N].
            events: [B, n, dim].
            timestamps: int64 microseconds [B, n].

        Returns:
            tuple: keys and values [blocks, H, B, N + n, d]; times [B, N + n]; the states of the
            new events, [B, n, dim].
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
        """Return the first block's input: events [B, L, dim], microseconds before them [B, L]."""
        x: Tensor = self.drop(self.norm_in(events + GAP_SCALE * self.gap(age_bucket(gaps))))
        return x

    def _blocks(self) -> list[EncoderBlock]:
        return [block for block in self.blocks if isinstance(block, EncoderBlock)]
