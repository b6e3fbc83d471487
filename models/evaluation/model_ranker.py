"""Adapts a recommender to the evaluation's `Ranker`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.compute.device import autocast, product_dtype
from models.data.interactions import Interactions
from models.data.windows import newest_windows
from models.encoder.event_types import is_liked
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.recommender import Recommender
from models.recommender.target_attention import target_attention

_BATCH_SIZE = 16  # users at once


class ModelRanker:
    """Scores the whole catalogue for each user, as the service would."""

    def __init__(
        self,
        model: Recommender,
        content: NDArray[np.float32],
        *,
        attention: bool = True,
        reduced_precision: bool = False,
    ) -> None:
        """Precompute the item tables.

        Args:
            model: in eval mode.
            content: text embeddings of its items [items, D].
            attention: whether the scores include the target attention.
            reduced_precision: take matrix products in the dtype of training: twice as fast, and
                accurate enough to choose an epoch by.
        """
        self._model = model
        self._device = device = model.prior.device
        dtype = product_dtype(device) if reduced_precision else torch.float32
        self._autocast = autocast(device, dtype)
        # An untrained attention adds nothing and takes half of the time.
        self._attention = attention and bool(model.cross_attention.w_o.weight.any())
        items = model.config.n_items
        with torch.inference_mode():
            self._tables = model.item_tables(
                torch.arange(items, device=device), self._to_device(content)
            )

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """Score each user's next event, [B, n_items]; an empty history gets the prior alone."""
        model = self._model
        if history.n_items != model.config.n_items:
            raise ValueError(
                f"the model ranks {model.config.n_items} items, the log has {history.n_items}"
            )
        order = np.argsort(history.lengths[users], kind="stable")
        out = np.empty((len(users), model.config.n_items), dtype=np.float32)
        with torch.inference_mode(), self._autocast:
            # Users with histories of similar length together.
            for part in np.array_split(order, -(-len(order) // _BATCH_SIZE)) if len(order) else ():
                times = None if request_times is None else request_times[part]
                out[part] = self._score(history, users[part], times)
        return out

    def _score(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        model, tables = self._model, self._tables
        window = newest_windows(history, users, model.config.window)
        events, times = self._to_device(window.items), self._to_device(window.timestamps)
        types, lengths = self._to_device(window.types), self._to_device(window.lengths)
        log_weights = torch.log(self._to_device(window.weights))
        batch = torch.arange(len(users), device=self._device)
        last = (lengths - 1).clamp(min=0)
        at = times[batch, last]  # the attention's request time, which is not clamped
        encoder_times = torch.full_like(times, NO_REQUEST_TIME)
        if request_times is not None:
            newest, at = at, self._to_device(request_times)
            encoder_times[batch, last] = model.clamp_request_time(at, newest)
        total = tables.prior.expand(len(users), -1).clone()
        if model.encoder is not None:
            inputs = model.event_inputs(tables.vectors[events], types, log_weights)
            states = model.user_states(inputs, times, encoder_times)[batch, last]
            states = states.float() * (lengths > 0)[:, None]
            counts = [
                self._counts(items[:length].flip(0), event_types[:length].flip(0))
                for items, event_types, length in zip(
                    events, types, window.lengths.tolist(), strict=True
                )
            ]
            transitions = model.transition_scores(states, torch.stack(counts))
            total += states @ tables.vectors.T + transitions
        if self._attention:
            distance = last[:, None] - torch.arange(events.shape[1], device=self._device)  # (B, L)
            bias = model.memory_bias(distance, at[:, None] - times, log_weights, types)
            bias = bias.transpose(0, 1).masked_fill((distance < 0)[:, None], -torch.inf)
            keys = tables.keys[:, events].transpose(0, 1)  # (B, H, L, d)
            values = tables.values[:, events].transpose(0, 1)
            some = lengths > 0
            if some.any():
                total[some] += target_attention(tables, keys[some], values[some], bias[some])
        scores: NDArray[np.float32] = total.cpu().numpy()
        return scores

    def _counts(self, items: Tensor, types: Tensor) -> Tensor:
        """Count the transitions of one user, [S, N], from items and types, newest first."""
        model = self._model
        counts = [2 * model.transition_counts.sums(items)]
        if model.counts_repeats:
            depth = model.cooccurrence_window.depth
            taken = items[:depth][is_liked(types[:depth], model.config.dislike_type)]
            counts.append(torch.bincount(taken, minlength=model.config.n_items).float())
        return torch.stack(counts)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
