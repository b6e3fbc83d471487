"""Heed's trained model over padded histories, as somebody would serve it without Heed's store.

The whole history of each user comes with the request, as rows of the model's items, and is read
anew each time. Every event is of the model's first type and has weight 1, as ratings have.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.attention.kv_memory import merge_heads
from models.data.windows import window_start
from models.recommender.recommender import Recommender
from models.recommender.target_attention import target_attention


class Padded:
    """The trained model over its own items; `models.ranking.scoring.score` computes the same.

    Args:
        model: in eval mode.
        content: text embeddings of its items [N, D].
    """

    def __init__(self, model: Recommender, content: NDArray[np.float32]) -> None:
        self._model = model
        with torch.inference_mode():
            rows = torch.arange(model.config.n_items)
            self._tables = model.item_tables(rows, torch.from_numpy(content))

    @torch.inference_mode()
    def scores(
        self,
        items: Tensor,
        times: Tensor,
        lengths: Tensor,
        asked: Tensor,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Scores [B, T] of targets, or [B, N] of every item.

        Args:
            items: int64 [B, L], oldest first; what follows the first `lengths` is padding.
            times: int64 microseconds [B, L].
            lengths: int64 [B], at least 1.
            asked: int64 microseconds [B], when each asks.
            targets: int64 [B, T] item rows; None = all.
        """
        tables = self._tables
        user, states, has_state = self._states(items, times, lengths, asked)  # user (B, dim)
        counted = self._counted(items, lengths)  # (B, S, N)
        distance = lengths[:, None] - 1 - torch.arange(items.shape[1])  # (B, L)
        age = (asked[:, None] - times).clamp(min=0)
        bias = self._model.memory_bias(
            distance.clamp(min=0), age, torch.zeros(()), torch.zeros_like(items)
        )
        bias = bias.masked_fill(distance < 0, -torch.inf).transpose(0, 1)  # (B, H, L)
        keys = tables.keys[:, items].transpose(0, 1)  # (B, H, L, d)
        values = tables.values[:, items].transpose(0, 1)
        projections = self._model.state_attention
        if projections is not None:  # rows that the encoder did not read are their items alone
            read = has_state[..., None]
            keys = keys + (projections.keys(states) * read).transpose(1, 2)
            values = values + (projections.values(states) * read).transpose(1, 2)
        query = self._model.user_query(user)  # (B, H, d)
        if targets is None:
            prior = tables.prior
            bias = bias + (keys @ query[..., None])[..., 0] * query.shape[-1] ** -0.5
            attention = target_attention(tables, keys, values, bias)
        else:
            prior = tables.prior[targets]
            counted = counted.gather(2, targets[:, None].expand(-1, counted.shape[1], -1))
            queries = tables.queries[:, targets].transpose(0, 1) + query[:, :, None]  # (B, H, T, d)
            context = scaled_dot_product_attention(queries, keys, values, bias[:, :, None])
            outputs = merge_heads(tables.outputs[:, targets].transpose(0, 1))
            attention = (merge_heads(context) * outputs).sum(-1)
        transitions = self._model.transition_scores(user, counted) if counted.shape[1] else 0.0
        return attention + transitions + prior

    def _states(
        self, items: Tensor, times: Tensor, lengths: Tensor, asked: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode the windows that the encoder reads.

        Returns:
            tuple: user states [B, dim]; states of events [B, L, dim]; whether an event has one, as
            0 or 1, [B, L, 1].
        """
        model = self._model
        starts = [window_start(length, model.config.window) for length in lengths.tolist()]
        start = torch.tensor(starts)[:, None]
        sizes = lengths[:, None] - start
        place = torch.arange(int(sizes.max()))
        at = (start + place).clamp(max=items.shape[1] - 1)
        read, when = items.gather(1, at), times.gather(1, at)
        batch, last = torch.arange(len(items)), (sizes - 1)[:, 0]
        newest = when[batch, last]
        # Padding may hold anything; the time of what precedes it keeps the ages in range.
        when = torch.where(place < sizes, when, newest[:, None])
        seen = model.event_inputs(
            self._tables.vectors[read], torch.zeros_like(read), torch.zeros(read.shape)
        )
        found = model.event_states(seen, when)
        request_times = model.statistics.clamp_request_time(asked, newest)
        user = model.user_states(found[batch, last], newest, request_times)
        every = torch.arange(items.shape[1])
        inside = (every >= start) & (every < lengths[:, None])  # (B, L)
        states = found.new_zeros(*items.shape, model.config.dim)
        states[inside] = found[place < sizes]
        return user, states, inside[..., None].to(states.dtype)

    def _counted(self, items: Tensor, lengths: Tensor) -> Tensor:
        """Return the counts of `Recommender.transitions`, [B, S, N], newest events first."""
        model = self._model
        if not model.has_transitions:
            return torch.zeros(len(items), 0, model.config.n_items)
        rows = []
        for row, length in zip(items, lengths.tolist(), strict=True):
            newest = row[:length].flip(0)[: model.statistics.cooccurrence_window.depth + 1]
            counts = [2 * model.statistics.transition_counts.sums(newest)]
            if model.counts_repeats:
                own = newest[: model.statistics.cooccurrence_window.depth]
                counts.append(torch.bincount(own, minlength=model.config.n_items).float())
            rows.append(torch.stack(counts))
        return torch.stack(rows)
