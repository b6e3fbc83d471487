"""The two training losses: the sequence loss with transitions, and the target attention's loss."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.compute.device import autocast, product_dtype
from models.data.interactions import Interactions
from models.encoder.event_types import is_liked
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.recent_popularity import RecentPopularity
from models.recommender.recommender import Recommender
from models.recommender.target_attention import target_attention_prefixes
from models.training.chunked_cross_entropy import MASKED_LOGIT, Chunk, chunked_cross_entropy
from models.training.held_out_transitions import HeldOutTransitions, log_repeat_counts
from models.training.negatives import SoftmaxItems, sample_columns, softmax_items
from models.training.train_config import TrainConfig
from models.training.window_batch import WindowBatch, WindowBatches

CHUNK_LOGITS = 640_000  # logits at once, few enough to stay in the cache
ATTENTION_SAMPLE = 256  # items drawn for each window of the target attention beside its targets


class TrainingStep(NamedTuple):
    """A batch with everything drawn for it."""

    batch: WindowBatch
    items: SoftmaxItems  # C items of the softmax
    keep_id: Tensor  # bool [N], items that keep their id in this step
    vectors: Tensor  # [C, dim] of the softmax's items
    prior: Tensor  # [C] popularity and sampling correction


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
            HeldOutTransitions(model.transition_counts, log) if model.has_transitions else None
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

    def sequence(self, windows: NDArray[np.int64]) -> tuple[Tensor, float]:
        """Compute the mean cross-entropy of sequence + transitions + prior."""
        step = self.draw(windows)
        batch = step.batch
        with autocast(self._device, self._dtype):
            events = self._item_vectors(batch.inputs, step.keep_id)
        states = self._user_states(step, events).flatten(0, 1)
        loss = chunked_cross_entropy(
            states,
            self._count_scales(states),
            step.vectors,
            step.prior,
            # An item in the padding need not have a column, and any column will do.
            targets=(step.items.columns(batch.targets) * batch.valid).flatten(),
            target_weights=batch.target_weights.flatten(),
            chunks=self._chunks(step),
            dtype=self._dtype,
        )
        return loss, float(batch.target_weights.sum())

    def attention(self, windows: NDArray[np.int64]) -> tuple[Tensor, float]:
        """Compute the mean cross-entropy of the whole score.

        With an encoder only the target attention gets a gradient. Each window is trained on its
        own targets and on a sample of the items that the rest of the score ranks high there.
        """
        model = self._model
        attention = model.cross_attention
        with torch.set_grad_enabled(model.encoder is None and torch.is_grad_enabled()):
            step = self.draw(windows)
            batch, own = step.batch, step.items.columns(step.batch.targets)
            events = self._item_vectors(batch.inputs, step.keep_id)
            logits = self._frozen_logits(step, events)
            if self._exclude_seen:
                logits = logits.masked_fill(seen_columns(batch, step.items, own), MASKED_LOGIT)
        columns, correction = sample_columns(logits.detach(), own, batch.valid, ATTENTION_SAMPLE)
        with autocast(self._device, self._dtype):
            tables = model.project_items(step.vectors, step.prior)
            normed = model.item_norm(events)
            keys = attention.keys(normed)
            values = keys if attention.tied else attention.values(normed)
        bias = self._memory_bias(batch)
        with autocast(self._device, self._dtype):
            attended = target_attention_prefixes(
                tables.queries[:, columns].transpose(0, 1),  # (B, H, P, d)
                tables.outputs[:, columns].transpose(0, 1),
                keys,
                values,
                bias,
            )
        width = batch.inputs.shape[1]
        frozen = logits.gather(2, columns[:, None].expand(-1, width, -1)) + correction[:, None]
        target = (columns[:, None] == own[:, :, None]).int().argmax(2)  # (B, L)
        weights = batch.target_weights[batch.valid]
        scores = (frozen + attended)[batch.valid]
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

    def _user_states(self, step: TrainingStep, events: Tensor) -> Tensor:
        """Encode the user state that each target sees, [B, L, dim], from its item vectors."""
        batch, model = step.batch, self._model
        with autocast(self._device, self._dtype):
            inputs = model.event_inputs(events, batch.types, batch.log_weights)
            states = model.user_states(inputs, batch.timestamps, batch.request_times)
        return batch.visible_state(states.float())

    def _frozen_logits(self, step: TrainingStep, events: Tensor) -> Tensor:
        """Compute sequence + transitions + prior at each position, [B, L, C]."""
        states = self._user_states(step, events)
        logits = states @ step.vectors.T
        scales = self._count_scales(states).unbind(-1)
        for scale, counts in zip(scales, self._log_counts(step), strict=True):
            logits = logits + scale[..., None] * counts.view_as(logits)
        return logits + step.prior

    def _memory_bias(self, batch: WindowBatch) -> Tensor:
        """Compute the target attention's bias of each prefix, [B, H, L, L]; -inf hides a row."""
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
        return bias.transpose(0, 1).masked_fill(future[:, None], -torch.inf)

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
                depth = self._model.cooccurrence_window.depth
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


def seen_columns(batch: WindowBatch, items: SoftmaxItems, own: Tensor) -> Tensor:
    """Mark the columns that a user has seen by each position, bool [B, L, C], targets aside.

    Args:
        batch: B windows of L inputs.
        items: C items of the softmax.
        own: int64 [B, L], the targets' columns.
    """
    width, (count, length) = len(items.rows), batch.inputs.shape
    first = torch.full((count, width + 1), length)  # the position that first saw a column
    position = torch.arange(length).expand(count, -1)
    first.scatter_reduce_(1, items.columns(batch.inputs), position, "amin")
    seen = first[:, None] <= batch.newest_inputs()[..., None]  # (B, L, C + 1)
    return seen.scatter_(2, own[:, :, None], False)[:, :, :width]
