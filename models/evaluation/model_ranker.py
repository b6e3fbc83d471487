"""A recommender as a ranker of the evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.compute.device import product_dtype
from models.data.interactions import Interactions
from models.data.windows import newest_windows
from models.encoder.event_types import is_liked
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.recommender import Recommender
from models.recommender.target_attention import target_attention

_BATCH = 16  # users at once


class ModelRanker:
    """Scores the whole catalogue for each user, as the service would."""

    name = "heed"

    def __init__(
        self,
        model: Recommender,
        content: NDArray[np.float32],
        *,
        attention: bool = True,
        reduced_precision: bool = False,
    ) -> None:
        """A ranker over the model's own items.

        Args:
            model: in eval mode.
            content: text embeddings of its items [items, D].
            attention: whether the target attention has a part in the scores.
            narrow: take matrix products in the dtype of training: twice as fast, and good enough
                to choose an epoch by.
        """
        self._model = model
        self._device = device = model.prior.device
        dtype = product_dtype(device) if reduced_precision else torch.float32
        self._products = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        # Before the attention is trained it adds nothing, at half of the cost.
        self._attention = attention and bool(model.cross_attention.w_o.weight.any())
        items = model.config.n_items
        with torch.inference_mode():
            self._tables = model.item_tables(
                torch.arange(items, device=device), self._placed(content)
            )

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """Scores [B, n_items] of each user's next event; zero but for the prior without history."""
        model = self._model
        if history.n_items != model.config.n_items:
            raise ValueError(
                f"the model ranks {model.config.n_items} items, the log has {history.n_items}"
            )
        order = np.argsort(history.lengths[users], kind="stable")
        out = np.empty((len(users), model.config.n_items), dtype=np.float32)
        with torch.inference_mode(), self._products:
            # Users of like length together; of no users there is no part.
            for part in np.array_split(order, -(-len(order) // _BATCH)) if len(order) else ():
                asked = None if request_times is None else request_times[part]
                out[part] = self._part(history, users[part], asked)
        return out

    def _part(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        model, tables = self._model, self._tables
        window = newest_windows(history, users, model.config.window)
        events, times = self._placed(window.items), self._placed(window.timestamps)
        types = self._placed(window.types)
        log_weights = torch.log(self._placed(window.weights))
        lengths = self._placed(window.lengths)
        batch = torch.arange(len(users), device=self._device)
        last = (lengths - 1).clamp(min=0)
        asked = torch.full_like(times, NO_REQUEST_TIME)
        now = times[batch, last]
        if request_times is not None:
            told = self._placed(request_times)
            asked[batch, last], now = (
                model.clamp_request_time(told, now),
                told,
            )  # attention sees the age itself
        total = tables.prior.expand(len(users), -1).clone()
        if model.encoder is not None:
            read = model.event_inputs(tables.vectors[events], types, log_weights)
            summary = model.user_states(read, times, asked)[batch, last]
            summary = summary.float() * (lengths > 0)[:, None]
            counts = [
                self._counts(row[:length].flip(0), kinds[:length].flip(0))
                for row, kinds, length in zip(events, types, window.lengths.tolist(), strict=True)
            ]
            total += summary @ tables.vectors.T + model.transition_scores(
                summary, torch.stack(counts)
            )
        if self._attention:
            distance = last[:, None] - torch.arange(events.shape[1], device=self._device)  # (B, L)
            bias = model.memory_bias(distance, now[:, None] - times, log_weights, types)
            bias = bias.transpose(0, 1).masked_fill((distance < 0)[:, None], -torch.inf)
            keys = tables.keys[:, events].transpose(0, 1)  # (B, H, L, d)
            values = tables.values[:, events].transpose(0, 1)
            some = lengths > 0
            if some.any():
                total[some] += target_attention(tables, keys[some], values[some], bias[some])
        scores: NDArray[np.float32] = total.cpu().numpy()
        return scores

    def _counts(self, items: Tensor, types: Tensor) -> Tensor:
        """What `Recommender.transitions` takes of one user, [S, N], newest item first."""
        model = self._model
        counts = [2 * model.transition_counts.sums(items)]
        if model.counts_repeats:
            depth = model.cooccurrence_window.depth
            taken = items[:depth][is_liked(types[:depth], model.config.dislike_type)]
            counts.append(torch.bincount(taken, minlength=model.config.n_items).float())
        return torch.stack(counts)

    def _placed(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
