"""The two losses of training: the sequence with its transitions, then the target attention."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.compute.device import product_dtype
from models.data.interactions import Interactions
from models.data.windows import pad_windows
from models.encoder.event_types import is_liked
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.recent_popularity import DAY, RecentPopularity
from models.recommender.recommender import Recommender
from models.recommender.target_attention import target_attention_prefixes
from models.recommender.transition_counts import (
    HeldOutTransitions,
    OwnTransitions,
    log_repeat_counts,
)
from models.training.chunked_cross_entropy import Chunk, chunked_cross_entropy
from models.training.log_profile import first_interactions, has_repeat_consumption, target_weights
from models.training.negatives import MASKED_LOGIT, SoftmaxItems, sample_columns, softmax_items

_CHUNK = 384  # rows of logits at once, few enough to stay in the cache
_STALE = 14 * DAY  # how old trends may be: a model is served for a while after it was trained
_PICKED = 256  # items drawn for each window of the target attention, its targets aside


class WindowBatch(NamedTuple):
    """Windows as inputs and targets: B windows, L inputs each."""

    inputs: Tensor  # int64 [B, L] item rows
    targets: Tensor  # int64 [B, L]
    timestamps: Tensor  # int64 [B, L] of the inputs
    request_times: Tensor  # int64 [B, L] of the targets; UNTOLD where the model is not to know
    log_weights: Tensor  # [B, L] of the inputs
    types: Tensor  # int64 [B, L] of the inputs
    target_weights: Tensor  # [B, L] of the targets; 0 in the padding, and for what was not liked
    valid: Tensor  # bool [B, L], False in the padding and where nothing is known yet
    events: NDArray[np.int64]  # [B, L] places of the inputs in the log
    popularity_times: Tensor  # int64 [B, L] when what was popular of late is known for each target
    newest_visible: (
        Tensor | None
    )  # int64 [B, L] the newest input that may be seen; None = its own place

    def at_request(self, each: Tensor) -> Tensor:
        """What there was of each input [B, L, ...], when each target was asked for."""
        return at_places(each, self.newest_visible)


def at_places(each: Tensor, state: Tensor | None) -> Tensor:
    """Rows [B, L, ...] of `each` [B, L, ...] at the places `state` [B, L]; None = their own."""
    return each if state is None else each[torch.arange(len(each))[:, None], state]


class TrainingLosses:
    """Losses of batches of windows over one log.

    Tensors are made where the model is: on another device than the processor, under
    `torch.device(...)` as a context.
    """

    def __init__(
        self,
        model: Recommender,
        log: Interactions,
        content: NDArray[np.float32],
        *,
        id_dropout: float,
        request_time_share: float,
        full_softmax_items: int,
        sampled_negatives: int,
    ) -> None:
        self._model, self._log = model, log
        self._device = device = model.prior.device
        self._content = torch.from_numpy(content).to(device)
        # Without a text nothing would be left of an item that loses its id.
        self._described = self._content.any(1)
        self._drop_id, self._request_time = id_dropout, request_time_share
        self._full_softmax, self._negatives = full_softmax_items, sampled_negatives
        # Without an encoder there are no transitions, whatever was counted.
        counts = model.encoder is not None and model.config.transitions_per_item
        own = OwnTransitions(log, model.cooccurrence_window) if counts else None
        self._counting = (
            HeldOutTransitions(model.transition_counts, own, model.cooccurrence_window)
            if own
            else None
        )
        self._trends = RecentPopularity(log, device) if model.config.next_basket else None
        self._hide_seen = not model.config.repeat_consumption
        counted = target_weights(log)
        if self._hide_seen and has_repeat_consumption(log):
            counted *= first_interactions(log)  # nobody is asked for what they had
        self._worth = torch.from_numpy(counted).to(device)
        self._dtype = product_dtype(device)

    def batch(self, spans: NDArray[np.int64]) -> WindowBatch:
        """Windows (first event, end) [n, 2] as inputs and targets."""
        cut = pad_windows(self._log, spans[:, 0], spans[:, 1])
        items, times = self._placed(cut.items), self._placed(cut.timestamps)
        told = torch.rand(len(spans), 1) < self._request_time
        place = torch.arange(items.shape[1] - 1)
        real = place < self._placed(cut.lengths - 1)[:, None]
        state, moments = None, times[:, 1:]
        if self._model.config.next_basket:
            moments = moments - (torch.rand(len(spans), 1) * _STALE).long()
            before = torch.searchsorted(times[:, :-1].contiguous(), times[:, 1:].contiguous())
            real = real & (before > 0)
            state = (before - 1).clamp(min=0)
        return WindowBatch(
            inputs=items[:, :-1].contiguous(),
            targets=items[:, 1:].contiguous(),
            timestamps=times[:, :-1].contiguous(),
            request_times=torch.where(told, times[:, 1:], NO_REQUEST_TIME),
            log_weights=self._placed(np.log(cut.weights[:, :-1])),
            types=self._placed(cut.types[:, :-1]),
            target_weights=self._worth[self._placed(cut.events[:, 1:])] * real,
            valid=real,
            events=cut.events[:, :-1],
            popularity_times=moments,
            newest_visible=state,
        )

    def sequence(self, spans: NDArray[np.int64]) -> tuple[Tensor, float]:
        """Mean cross-entropy of sequence + transitions + prior, and what its targets count."""
        batch, model = self.batch(spans), self._model
        among = self._candidates(batch)
        keep = self._kept()
        vectors = self._vectors(among.rows, keep)
        with self._narrow():
            events = self._vectors(batch.inputs, keep)
            summary = model.user_states(
                self._read(batch, events), batch.timestamps, batch.request_times
            )
        summary = batch.at_request(summary.float()).flatten(0, 1)
        loss = chunked_cross_entropy(
            summary,
            self._scales(summary),
            vectors,
            self._prior(among, keep),
            # What stands in the padding need not be a candidate, and any column will do.
            targets=(among.columns(batch.targets) * batch.valid).flatten(),
            target_weights=batch.target_weights.flatten(),
            chunks=self._chunks(batch, among, keep),
            dtype=self._dtype,
        )
        return loss, float(batch.target_weights.sum())

    def attention(self, spans: NDArray[np.int64]) -> tuple[Tensor, float]:
        """Mean cross-entropy of the whole score, and what its targets count together.

        Only the target attention gets a gradient where there is an encoder. Each window is trained
        on its own targets and on a sample of what the rest of the score thinks likely there.
        """
        batch, model = self.batch(spans), self._model
        among = self._candidates(batch)
        alone = model.encoder is None
        with torch.set_grad_enabled(alone and torch.is_grad_enabled()):
            keep = self._kept()
            vectors = self._vectors(among.rows, keep)
            events = self._vectors(batch.inputs, keep)
            prior = self._prior(among, keep)
            logits = self._rest(batch, among, events, vectors, keep) + prior
            own = among.columns(batch.targets)
            if self._hide_seen:
                logits = logits.masked_fill(self._seen(batch, among, own), MASKED_LOGIT)
        columns, correction = sample_columns(logits.detach(), own, batch.valid, _PICKED)
        with self._narrow():
            tables = model.project_items(vectors, prior)
            normed = model.item_norm(events)
            keys = model.cross_attention.keys(normed)
            values = keys if model.cross_attention.tied else model.cross_attention.values(normed)
        place = torch.arange(batch.inputs.shape[1])
        newest = place if batch.newest_visible is None else batch.newest_visible
        distance = newest[..., None] - place  # (L, L), or for each window
        latest = batch.at_request(batch.timestamps)
        asked = torch.where(batch.request_times == NO_REQUEST_TIME, latest, batch.request_times)
        bias = model.memory_bias(
            distance,
            asked[:, :, None] - batch.timestamps[:, None],
            batch.log_weights[:, None],
            batch.types[:, None],
        )
        future = (distance < 0).expand(bias.shape[1:])
        bias = bias.transpose(0, 1).masked_fill(future[:, None], -torch.inf)  # (B, H, L, L)
        with self._narrow():
            attended = target_attention_prefixes(
                tables.queries[:, columns].transpose(0, 1),  # (B, H, C, d)
                tables.outputs[:, columns].transpose(0, 1),
                keys,
                values,
                bias,
            )
        width = batch.inputs.shape[1]
        rest = logits.gather(2, columns[:, None].expand(-1, width, -1)) + correction[:, None]
        target = (columns[:, None] == own[:, :, None]).int().argmax(2)  # (B, L)
        worth = batch.target_weights[batch.valid]
        whole = (rest + attended)[batch.valid]
        each = cross_entropy(whole, target[batch.valid], reduction="none")
        return (each * worth).sum() / worth.sum().clamp(min=1e-30), float(worth.sum())

    # ------------------------------------------------------------------ the parts

    def _narrow(self) -> torch.autocast:
        """Matrix products in the dtype that the device is fast in."""
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _placed(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _candidates(self, batch: WindowBatch) -> SoftmaxItems:
        targets = batch.targets[batch.valid]
        return softmax_items(self._log.n_items, targets, self._full_softmax, self._negatives)

    def _kept(self) -> Tensor:
        """Which items have their id in this step, bool [N].

        The others are as new ones are: they have the prior of the new, and follow nothing, so that
        texts are learned by what has to stand beside known items with nothing else.
        """
        return (torch.rand(self._log.n_items) >= self._drop_id) | ~self._described

    def _prior(self, candidates: SoftmaxItems, keep: Tensor) -> Tensor:
        rows = candidates.rows
        prior = torch.where(keep[rows], self._model.prior[rows], self._model.new_prior)
        return prior + candidates.correction

    def _vectors(self, rows: Tensor, keep: Tensor) -> Tensor:
        return self._model.item_vectors(rows, self._content[rows], keep[rows])

    def _read(self, batch: WindowBatch, events: Tensor) -> Tensor:
        return self._model.event_inputs(events, batch.types, batch.log_weights)

    def _rest(
        self,
        batch: WindowBatch,
        candidates: SoftmaxItems,
        events: Tensor,
        vectors: Tensor,
        keep: Tensor,
    ) -> Tensor:
        """Sequence + transitions of each position, [B, L, C]."""
        model = self._model
        with self._narrow():
            read = self._read(batch, events)
            summary = model.user_states(read, batch.timestamps, batch.request_times).float()
        summary = batch.at_request(summary)
        logits = summary @ vectors.T
        counted = self._counted(batch, candidates, keep)
        for scale, each in zip(self._scales(summary).unbind(-1), counted, strict=True):
            logits = logits + scale[..., None] * each.view_as(logits)
        return logits

    def _scales(self, summary: Tensor) -> Tensor:
        """What each of `_counted` is multiplied by, [..., S], from summaries [..., dim]."""
        model = self._model
        parts = [] if self._counting is None else [model.transition_scale(summary)]
        if model.recent_popularity_weight is not None:
            parts.append(model.recent_popularity_weight.expand(*summary.shape[:-1], -1))
        return torch.cat(parts, -1) if parts else summary[..., :0]

    def _counted(
        self,
        batch: WindowBatch,
        candidates: SoftmaxItems,
        keep: Tensor,
        windows: slice = slice(None),
    ) -> list[Tensor]:
        """What is counted of every candidate at each position of some windows, S of [rows, C]."""
        width, counted = len(candidates.rows), []
        new = ~keep[candidates.rows]
        if self._counting is not None:
            items, events = batch.inputs[windows], batch.events[windows]
            after = self._counting.log_counts(items, events, candidates.column, width)
            counted.append(after.mul_(~new))  # many times faster than filling
            if self._model.counts_repeats:
                took = is_liked(batch.types[windows], self._model.config.dislike_type).float()
                counted.append(
                    log_repeat_counts(
                        candidates.columns(items), took, width, self._model.cooccurrence_window
                    )
                )
        state = None if batch.newest_visible is None else batch.newest_visible[windows]
        counted = [at_places(each, state).flatten(0, 1) for each in counted]
        if self._trends is not None:
            places = self._trends.steps(batch.popularity_times[windows].flatten())
            # What has no id is as if nobody had taken it.
            counted += self._trends.scores(places, torch.where(new, -1, candidates.rows)).unbind()
        return counted

    def _chunks(self, batch: WindowBatch, candidates: SoftmaxItems, keep: Tensor) -> list[Chunk]:
        """Whole windows together, about `_CHUNK` positions each."""
        count, length = batch.inputs.shape
        width = len(candidates.rows)
        each = max(1, _CHUNK // length)
        place = torch.arange(length)
        columns = candidates.columns(batch.inputs)
        chunks = []
        for first in range(0, count, each):
            windows = slice(first, min(count, first + each))
            hidden = torch.zeros(0, dtype=torch.int64)
            if self._hide_seen:
                newest = place if batch.newest_visible is None else batch.newest_visible[windows]
                past = place <= newest[..., None]  # (L, L), or for each window
                seen = columns[windows, None, :].expand(-1, length, -1)  # (b, L, L)
                row = torch.arange(len(seen) * length).view(-1, length, 1) * width
                hidden = (row + seen)[past & (seen < width)]
            counts = partial(self._counted, batch, candidates, keep, windows)
            chunks.append(Chunk(first * length, windows.stop * length, hidden, counts))
        return chunks

    @staticmethod
    def _seen(batch: WindowBatch, candidates: SoftmaxItems, own: Tensor) -> Tensor:
        """True at the columns a user has seen by each position [B, L, C], but for the target."""
        count, length = batch.inputs.shape
        width = len(candidates.rows)
        place = torch.arange(length)
        first = torch.full((count, width + 1), length)  # the position that first saw the column
        columns = candidates.columns(batch.inputs)
        first.scatter_reduce_(1, columns, place.expand(count, -1), "amin")
        newest = place if batch.newest_visible is None else batch.newest_visible
        seen = first[:, None] <= newest[..., None]  # (B, L, C + 1)
        return seen.scatter_(2, own[:, :, None], False)[:, :, :width]
