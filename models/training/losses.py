"""The training losses: exact without the target in the query, sampled with it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.attention.kv_memory import merge_heads
from models.compute.device import autocast, product_dtype
from models.data.interactions import Interactions
from models.encoder.causal_attention import causal_attention, causal_buckets
from models.encoder.event_bias import is_liked
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.recent_popularity import RecentPopularity
from models.recommender.recommender import Recommender
from models.recommender.target_attention import target_attention_prefixes
from models.training.chunked_cross_entropy import MASKED_LOGIT, Chunk, chunked_cross_entropy
from models.training.held_out_transitions import HeldOutTransitions, log_repeat_counts
from models.training.negatives import (
    SoftmaxItems,
    sample_columns,
    seen_columns,
    softmax_items,
)
from models.training.train_config import TrainConfig
from models.training.window_batch import WindowBatch, WindowBatches, draw_stateless_rows

CHUNK_LOGITS = 640_000  # logits at once, few enough to stay in the cache
ATTENTION_SAMPLE = 256  # items drawn for each window beside its targets


class TrainingStep(NamedTuple):
    """A batch with everything drawn for it."""

    batch: WindowBatch
    items: SoftmaxItems  # C items of the softmax
    keep_id: Tensor  # bool [N], items that keep their id in this step
    vectors: Tensor  # [C, dim] of the softmax's items
    prior: Tensor  # [C] popularity and sampling correction


class AttendedRows(NamedTuple):
    """What the prefixes of B windows of L events attend to, and by what."""

    keys: Tensor  # [B, H, L, d]
    values: Tensor  # [B, H, L, d]
    users: Tensor  # [B, L, dim] the user state of each prefix
    queries: Tensor  # [B, H, L, d] the users' part of the queries


class TrainingLosses:
    """Losses of batches of windows over one log, each a `models.training.stage.LossFunction`.

    Tensors are made on the model's device; on another device than the CPU, call it under
    `torch.device(...)` as a context.
    """

    def __init__(
        self,
        model: Recommender,
        log: Interactions,
        content: NDArray[np.float32],
        config: TrainConfig,
    ) -> None:
        """Count what the losses need of the log.

        The model has its statistics loaded and lies on the device of the training; content is the
        text embeddings [N, D].
        """
        self._model, self._log, self._config = model, log, config
        self._device = device = model.prior.device
        self._content = torch.from_numpy(content).to(device)
        # Without a text nothing would be left of an item that loses its id.
        self._has_content = self._content.any(1)
        self._transitions = (
            HeldOutTransitions(model.statistics.transition_counts, log)
            if model.has_transitions
            else None
        )
        self._popularity = RecentPopularity(log, device) if model.config.next_basket else None
        self._exclude_seen = not model.config.repeat_consumption
        self._batches = WindowBatches(
            log,
            device,
            next_basket=model.config.next_basket,
            exclude_seen=self._exclude_seen,
            request_time_share=config.request_time_share,
        )
        self._dtype = product_dtype(device)

    def full_softmax(self, windows: NDArray[np.int64]) -> tuple[Tensor, float]:
        """Compute the mean cross-entropy with queries that are the same for every target.

        One readout of each prefix then stands for the attention of all targets.
        """
        step = self.draw(windows)
        batch = step.batch
        with autocast(self._device, self._dtype):
            rows = self._attended_rows(step, self._item_vectors(batch.inputs, step.keep_id))
            readout = self._read_out(batch, rows).float()
        loss = chunked_cross_entropy(
            batch.visible_state(readout).flatten(0, 1),
            self._count_scales(batch.visible_state(rows.users.float()).flatten(0, 1)),
            step.vectors,
            step.prior,
            # An item in the padding need not have a column, and any column will do.
            targets=(step.items.columns(batch.targets) * batch.valid).flatten(),
            target_weights=batch.target_weights.flatten(),
            chunks=self._chunks(step),
            dtype=self._dtype,
        )
        return loss, float(batch.target_weights.sum())

    def sampled_softmax(self, windows: NDArray[np.int64]) -> tuple[Tensor, float]:
        """Compute the mean cross-entropy with the target in the query, over a sample of the items.

        Each window is trained on its own targets and on a sample of the items that the model
        without the target in its queries ranks high there. With an encoder, the encoder gets no
        gradient.
        """
        model, step = self._model, self.draw(windows)
        batch, own = step.batch, step.items.columns(step.batch.targets)
        with autocast(self._device, self._dtype):
            rows = self._attended_rows(step, self._item_vectors(batch.inputs, step.keep_id))
            with torch.no_grad():
                readout = batch.visible_state(self._read_out(batch, rows).float())
        rest = self._rest_logits(step, batch.visible_state(rows.users.float()))
        logits = rest.detach() + readout @ step.vectors.detach().T
        if self._exclude_seen:
            logits = logits.masked_fill_(seen_columns(batch, step.items, own), MASKED_LOGIT)
        columns, correction = sample_columns(logits, own, batch.valid, ATTENTION_SAMPLE)
        # The sample has items that a window saw early, which its later targets are not among.
        hidden = logits.gather(2, columns[:, None].expand(-1, logits.shape[1], -1)) <= MASKED_LOGIT
        with autocast(self._device, self._dtype):
            tables = model.project_items(step.vectors, step.prior)
            attended = target_attention_prefixes(
                tables.queries[:, columns].transpose(0, 1),  # (B, H, P, d)
                tables.outputs[:, columns].transpose(0, 1),
                rows.keys,
                rows.values,
                self._prefix_bias(batch, rows),
            )
        width = batch.inputs.shape[1]
        others = rest.gather(2, columns[:, None].expand(-1, width, -1)) + correction[:, None]
        target = (columns[:, None] == own[:, :, None]).int().argmax(2)  # (B, L)
        weights = batch.target_weights[batch.valid]
        scores = (others + attended).masked_fill(hidden, MASKED_LOGIT)[batch.valid]
        losses = cross_entropy(scores, target[batch.valid], reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1e-30), float(weights.sum())

    # ------------------------------------------------------------------ a step's parts

    def draw(self, windows: NDArray[np.int64]) -> TrainingStep:
        """Build the batch and draw its softmax items and dropped ids."""
        batch = self._batches.batch(windows)
        items = softmax_items(
            self._log.n_items,
            batch.targets[batch.valid],
            self._config.full_softmax_items,
            self._config.sampled_negatives,
        )
        # The other items are treated as new, with the new items' prior and without transitions, so
        # that text embeddings are trained against known items on their own.
        keep_id = (torch.rand(self._log.n_items) >= self._config.id_dropout) | ~self._has_content
        prior = torch.where(
            keep_id[items.rows], self._model.prior[items.rows], self._model.new_prior
        )
        vectors = self._item_vectors(items.rows, keep_id)
        return TrainingStep(batch, items, keep_id, vectors, prior + items.correction)

    def _item_vectors(self, rows: Tensor, keep_id: Tensor) -> Tensor:
        return self._model.item_vectors(rows, self._content[rows], keep_id[rows])

    def _attended_rows(self, step: TrainingStep, events: Tensor) -> AttendedRows:
        """Compute the rows that prefixes attend to, from the item vectors [B, L, dim] of events.

        Some windows have rows without states, see `draw_stateless_rows`.
        """
        batch, model = step.batch, self._model
        inputs = model.event_inputs(events, batch.types, batch.log_weights)
        states = model.event_states(inputs, batch.timestamps)
        users = model.user_states(states, batch.timestamps, batch.request_times)
        count, length = batch.inputs.shape
        stateless = draw_stateless_rows(count, length, self._config.item_rows_share)
        has_state = (torch.arange(length) >= stateless)[..., None].to(states.dtype)
        users = users * (stateless < length)[..., None].to(users.dtype)
        keys, values = model.attended_rows(events, states, has_state)
        return AttendedRows(keys, values, users, model.user_query(users).transpose(1, 2))

    def _read_out(self, batch: WindowBatch, rows: AttendedRows) -> Tensor:
        """Attend from each prefix by its user's query alone: r_t [B, L, dim]."""
        latest = torch.where(
            batch.request_times == NO_REQUEST_TIME, batch.timestamps, batch.request_times
        )
        model, row_bias = self._model, None
        if model.type_bias is not None or bool(batch.log_weights.any()):
            row_bias = batch.log_weights.expand(model.config.attention_heads, -1, -1)
            if model.type_bias is not None:
                row_bias = row_bias + model.type_bias(batch.types)
        context = causal_attention(
            rows.queries.transpose(0, 1),
            rows.keys.transpose(0, 1),
            rows.values.transpose(0, 1),
            model.recency.table(),
            causal_buckets(batch.timestamps, latest),
            row_bias,
        )  # (H, B, L, d)
        readout: Tensor = model.cross_attention.w_o(merge_heads(context.transpose(0, 1)))
        return readout

    def _rest_logits(self, step: TrainingStep, users: Tensor) -> Tensor:
        """Compute transitions + prior at each position, [B, L, C], from user states."""
        logits = step.prior.expand(*users.shape[:2], -1)
        scales = self._count_scales(users).unbind(-1)
        for scale, counts in zip(scales, self._log_counts(step), strict=True):
            logits = logits + scale[..., None] * counts.view_as(logits)
        return logits

    def _prefix_bias(self, batch: WindowBatch, rows: AttendedRows) -> Tensor:
        """Compute the scores of each prefix without the target, [B, H, L, L]; -inf hides a row."""
        newest = batch.newest_inputs()
        distance = newest[..., None] - torch.arange(batch.inputs.shape[1])  # (L, L) or (B, L, L)
        latest = batch.visible_state(batch.timestamps)
        times = torch.where(batch.request_times == NO_REQUEST_TIME, latest, batch.request_times)
        bias = self._model.memory_bias(
            distance,
            times[:, :, None] - batch.timestamps[:, None],
            batch.log_weights[:, None],
            batch.types[:, None],
        )
        future = (distance < 0).expand(bias.shape[1:])
        bias = bias.transpose(0, 1).masked_fill(future[:, None], -torch.inf)
        queries = batch.visible_state(rows.queries.transpose(1, 2)).transpose(1, 2)
        scores: Tensor = bias + (queries @ rows.keys.mT).float() * queries.shape[-1] ** -0.5
        return scores

    def _count_scales(self, states: Tensor) -> Tensor:
        """Return the factor of each of `_log_counts`, [..., S], from user states [..., dim]."""
        model = self._model
        parts = [] if self._transitions is None else [model.transition_scale(states)]
        if model.recent_popularity_weight is not None:
            parts.append(model.recent_popularity_weight.expand(*states.shape[:-1], -1))
        return torch.cat(parts, -1) if parts else states[..., :0]

    def _log_counts(self, step: TrainingStep, windows: slice = slice(None)) -> list[Tensor]:
        """Count every softmax item at each position of some windows, S of [positions, C]."""
        batch, items, counts = step.batch, step.items, []
        width, new = len(items.rows), ~step.keep_id[items.rows]
        if self._transitions is not None:
            inputs, events = batch.inputs[windows], batch.events[windows]
            transitions = self._transitions.log_counts(inputs, events, items.column, width)
            counts.append(transitions.mul_(~new))  # many times faster than masked_fill
            if self._model.counts_repeats:
                liked = is_liked(batch.types[windows], self._model.config.dislike_type).float()
                depth = self._model.statistics.cooccurrence_window.depth
                counts.append(log_repeat_counts(items.columns(inputs), liked, width, depth))
        counts = [batch.visible_state(each, windows).flatten(0, 1) for each in counts]
        if self._popularity is not None:
            steps = self._popularity.steps(batch.popularity_times[windows].flatten())
            counts += self._popularity.scores(steps, torch.where(new, -1, items.rows)).unbind()
        return counts

    def _chunks(self, step: TrainingStep) -> list[Chunk]:
        """Split the batch into chunks of whole windows, of about `CHUNK_LOGITS` logits each."""
        batch = step.batch
        count, length = batch.inputs.shape
        width = len(step.items.rows)
        windows_each = max(1, CHUNK_LOGITS // (length * width))
        columns = step.items.columns(batch.inputs)
        chunks = []
        for first in range(0, count, windows_each):
            windows = slice(first, min(count, first + windows_each))
            hidden = torch.zeros(0, dtype=torch.int64)
            if self._exclude_seen:
                newest = batch.newest_inputs(windows)
                past = torch.arange(length) <= newest[..., None]  # (L, L) or (b, L, L)
                seen = columns[windows, None, :].expand(-1, length, -1)  # (b, L, L)
                row = torch.arange(len(seen) * length).view(-1, length, 1) * width
                hidden = (row + seen)[past & (seen < width)]
            counts = partial(self._log_counts, step, windows)
            chunks.append(Chunk(first * length, windows.stop * length, hidden, counts))
        return chunks
