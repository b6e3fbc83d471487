"""Adapts a recommender to the evaluation's `Ranker`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import gather_rows
from models.attention.partial_softmax import KVBlock, attend_blocks, query_jacobian
from models.compute.device import autocast, product_dtype
from models.data.interactions import Interactions
from models.data.windows import newest_windows, pad_windows
from models.encoder.event_bias import is_liked
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.co_occurrence import ItemSimilarity
from models.recommender.recommender import Recommender
from models.recommender.target_attention import CANDIDATES, first_order, target_attention

_BATCH_SIZE = 16  # users at once


class ModelRanker:
    """Scores the whole catalogue for each user, as the service would."""

    def __init__(
        self,
        model: Recommender,
        content: NDArray[np.float32],
        *,
        target_in_query: bool = True,
        reduced_precision: bool = False,
        two_stage: bool = False,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        """Precompute the item tables of a model in eval mode for items with `content` [items, D].

        `target_in_query`: queries have the target's part beside the user's. `reduced_precision`:
        matrix products in the dtype of training, twice as fast and accurate enough to choose an
        epoch by. `two_stage`: rank as recommendations do, the candidates of the coarse step by
        their exact scores, the others by those to first order in the target's part of the queries:
        a tenth of the time in a large catalogue. `rows` [items] are the model's rows of the items,
        -1 for one that it was not trained on; by default the items are those of the model.
        """
        self._model = model
        self._device = device = model.prior.device
        dtype = product_dtype(device) if reduced_precision else torch.float32
        self._autocast = autocast(device, dtype)
        # If the target's part of the queries is zero, one readout serves all targets.
        self._target_in_query = target_in_query and bool(model.cross_attention.w_q.weight.any())
        self._items = items = model.config.n_items if rows is None else len(rows)
        self._candidates = min(items, CANDIDATES) if two_stage else items
        own = torch.arange(items) if rows is None else torch.from_numpy(rows)
        self._rows = None if rows is None else own.to(device)
        with torch.inference_mode():
            self._tables = model.item_tables(own.to(device), self._to_device(content))

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """Score each user's next event, [B, n_items]; an empty history gets the prior."""
        if history.n_items != self._items:
            raise ValueError(f"the model ranks {self._items} items, the log has {history.n_items}")
        order = np.argsort(history.lengths[users], kind="stable")
        out = np.empty((len(users), self._items), dtype=np.float32)
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
        begins, ends = history.offsets[users], history.offsets[users + 1]
        every = pad_windows(history, begins, ends)
        events, times = self._to_device(every.items), self._to_device(every.timestamps)
        types, lengths = self._to_device(every.types), self._to_device(every.lengths)
        log_weights = torch.log(self._to_device(every.weights))
        batch = torch.arange(len(users), device=self._device)
        last = (lengths - 1).clamp(min=0)
        newest = times[batch, last]
        at = newest if request_times is None else self._to_device(request_times)
        states, has_state = self._states(history, users, events.shape[1])
        request = torch.full_like(at, NO_REQUEST_TIME)
        if request_times is not None:
            request = model.statistics.clamp_request_time(at, newest)
        some = (lengths > 0)[:, None]
        user = model.user_states(states[batch, last], newest, request).float() * some
        total = tables.prior.expand(len(users), -1).clone()
        if model.has_transitions:
            counts = [
                _user_counts(model, items, event_types, self._rows)
                for items, event_types in _newest_first(events, types, every.lengths)
            ]
            total += model.transition_scores(user, torch.stack(counts))
        similarity = model.statistics.similarity
        if similarity is not None:
            sums = [
                similarity.sums(
                    _rows_of(items, self._rows), is_liked(event_types, model.config.dislike_type)
                )
                for items, event_types in _newest_first(events, types, every.lengths)
            ]
            total += torch.stack([_spread(each, self._rows) for each in sums])
        distance = last[:, None] - torch.arange(events.shape[1], device=self._device)  # (B, L)
        bias = model.memory_bias(distance, at[:, None] - times, log_weights, types)
        hidden = (distance < 0) | ~some
        bias = bias.transpose(0, 1).masked_fill(hidden[:, None], -torch.inf)
        keys, values = model.attended_rows(tables.vectors[events], states, has_state)
        query = model.user_query(user)  # (B, H, d)
        whole = bias + (keys @ query[..., None])[..., 0].float() * query.shape[-1] ** -0.5
        if self._target_in_query and self._candidates == len(tables.prior):
            total += target_attention(tables, keys, values, whole)
        else:
            near = total + model.read_out(values, whole).float() @ tables.vectors.T
            if self._target_in_query:
                seen = [own[:length] for own, length in zip(events, every.lengths, strict=True)]
                self._rescore(near, total, seen, (query, keys, values, bias))
            total = near
        scores: NDArray[np.float32] = total.cpu().numpy()
        return scores

    def _rescore(
        self,
        near: Tensor,
        others: Tensor,
        seen: Iterable[Tensor],
        memory: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """Score all items to first order in the target's part of the queries, the best exactly.

        `near` [B, N], scores without that part, is changed in place; `others` [B, N] are the parts
        of the scores but the attention; `seen` the items of each history. `memory` is the user's
        part of the queries [B, H, d], keys and values [B, H, L, d] and bias [B, H, L].
        """
        tables = self._tables
        for row, (items, *own) in enumerate(zip(seen, *memory, strict=True)):
            query, keys, values, bias = (part.float() for part in own)
            jacobian = query_jacobian(query, keys, values, bias)
            near[row] += first_order(tables.queries, tables.outputs, jacobian)
            order = near[row]
            if not self._model.config.repeat_consumption:  # seen items are not recommended
                order = order.index_fill(0, items, -torch.inf)
            chosen = order.topk(self._candidates, sorted=False).indices
            queries = gather_rows(tables.queries, chosen) + query[:, None]
            context = attend_blocks(queries, [KVBlock(keys, values, bias)]).context
            attention = (context * gather_rows(tables.outputs, chosen)).sum((0, 2))
            near[row, chosen] = others[row, chosen] + attention

    def _states(
        self, history: Interactions, users: NDArray[np.int32], length: int
    ) -> tuple[Tensor, Tensor]:
        """Encode the newest events of histories: states [B, L, dim] and whether there is one."""
        model = self._model
        states = torch.zeros(len(users), length, model.config.dim, device=self._device)
        has_state = torch.zeros(len(users), length, 1, device=self._device)
        if model.encoder is None:
            return states, has_state
        window = newest_windows(history, users, model.config.window)
        items, times = self._to_device(window.items), self._to_device(window.timestamps)
        types = self._to_device(window.types)
        log_weights = torch.log(self._to_device(window.weights))
        inputs = model.event_inputs(self._tables.vectors[items], types, log_weights)
        read = model.event_states(inputs, times).float()
        for row, (size, total) in enumerate(
            zip(window.lengths.tolist(), history.lengths[users].tolist(), strict=True)
        ):
            states[row, total - size : total] = read[row, :size]
            has_state[row, total - size : total] = 1
        return states, has_state

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class PartRanker:
    """Scores the catalogue by one part of a model's scores.

    `score` gives a user's [n_items] from their items and types int64 [n], newest first.
    """

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> None:
        self._score, self._device = score, device

    def scores(
        self, history: Interactions, users: NDArray[np.int32], _times: object = None, /
    ) -> NDArray[np.float32]:
        out = np.empty((len(users), history.n_items), dtype=np.float32)
        for row, user in enumerate(users):
            events = slice(history.offsets[user], history.offsets[user + 1])
            items, types = (
                torch.from_numpy(part[events][::-1].copy()).long().to(self._device)
                for part in (history.items, history.types)
            )
            out[row] = self._score(items, types).cpu().numpy()
        return out


def transition_ranker(model: Recommender, count: int) -> PartRanker:
    """Rank by log(1 + one of a model's transition counts): `count` is the row of λ, 0 for 2F."""
    return PartRanker(
        lambda items, types: torch.log1p(_user_counts(model, items, types)[count]),
        model.prior.device,
    )


def similarity_ranker(similarity: ItemSimilarity, dislike_type: int) -> PartRanker:
    return PartRanker(
        lambda items, types: similarity.sums(items, is_liked(types, dislike_type)),
        similarity.weights.device,
    )


def _newest_first(
    items: Tensor, types: Tensor, lengths: NDArray[np.integer[Any]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over the rows [L] of padded columns, without the padding and newest first."""
    for own, own_types, length in zip(items, types, lengths.tolist(), strict=True):
        yield own[:length].flip(0), own_types[:length].flip(0)


def _user_counts(
    model: Recommender, items: Tensor, types: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Count the transitions of one user, [S, N], from items and types, newest first.

    `rows` are those of the model for each of the N items, the model's own items by default.
    """
    followed = model.statistics.transition_counts.sums(_rows_of(items, rows))
    counts = [_spread(2 * followed, rows)]
    if model.counts_repeats:
        depth = model.statistics.cooccurrence_window.depth
        taken = items[:depth][is_liked(types[:depth], model.config.dislike_type)]
        counts.append(torch.bincount(taken, minlength=len(counts[0])).float())
    return torch.stack(counts)


def _rows_of(items: Tensor, rows: Tensor | None) -> Tensor:
    return items if rows is None else rows[items]


def _spread(sums: Tensor, rows: Tensor | None) -> Tensor:
    """Sums of a model's items [n_items] for other items, by `rows` [N]; 0 at row -1."""
    return sums if rows is None else torch.cat([sums, sums.new_zeros(1)])[rows]
