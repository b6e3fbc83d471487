"""The training losses: exact without the target in the query, sampled with it.

The exact cross-entropy over many classes computes its gradient in the forward pass, chunk by chunk.
Its items are all of a small catalogue, and a sample of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.attention.attend import merge_heads
from models.compute.device import autocast, product_dtype
from models.data.interactions import Interactions
from models.encoder.causal_attention import causal_attention, causal_buckets
from models.encoder.event_bias import is_liked
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.recent_popularity import RecentPopularity
from models.recommender.recommender import Recommender
from models.recommender.target_attention import target_attention_prefixes
from models.training.presets import TrainConfig
from models.training.window_batch import (
    HeldOutTransitions,
    WindowBatch,
    WindowBatches,
    draw_stateless_rows,
    log_repeat_counts,
)

MASKED_LOGIT = -1e9  # probability 0 after softmax, yet finite, so that gradients stay finite


class Chunk(NamedTuple):
    """Rows [first, last) of the loss, few enough for their logits to stay in the cache."""

    first: int
    last: int
    hidden: Tensor  # int64 [any], flat indices into the chunk's [rows, classes] to mask
    counts: Callable[[], Sequence[Tensor]] | None  # S of [rows, classes], multiplied by `scale`


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Σ_t w_t (log Σ_c e^z_tc − z_t,target) / Σ w with z = h Eᵀ + b + Σ_s λ_s·C_s."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        scale: Tensor,
        classes: Tensor,
        bias: Tensor,
        targets: Tensor,
        target_weights: Tensor,
        chunks: Iterable[Chunk],
        dtype: torch.dtype,
    ) -> Tensor:
        narrow, low = classes.to(dtype), states.to(dtype)
        to_states = torch.empty_like(states)
        to_scale = torch.zeros_like(scale)
        to_classes, to_bias = torch.zeros_like(classes), torch.zeros_like(bias)
        total = states.new_zeros(())
        for first, last, hidden, counts in chunks:
            rows = slice(first, last)
            target, weight = targets[rows, None], target_weights[rows, None]
            logits = torch.mm(low[rows], narrow.T).float().add_(bias)
            chunk_counts = counts() if counts is not None else ()
            for number, each in enumerate(chunk_counts):
                logits.addcmul_(each, scale[rows, number, None])
            own = logits.gather(1, target)
            logits.view(-1)[hidden] = MASKED_LOGIT
            logits.scatter_(1, target, own)  # a target is never masked
            peak = logits.amax(1, keepdim=True)
            shares = logits.sub_(peak).exp_()
            partition = shares.sum(1, keepdim=True)
            total += ((partition.log() + peak - own) * weight).sum()
            shares.mul_(weight / partition).scatter_add_(1, target, -weight)
            for number, each in enumerate(chunk_counts):
                to_scale[rows, number] = torch.linalg.vecdot(shares, each)
            to_bias += shares.sum(0)
            shares = shares.to(dtype)
            to_states[rows] = torch.mm(shares, narrow)
            to_classes += torch.mm(shares.T, low[rows])
        weights = target_weights.sum().clamp(min=1e-30)
        gradients = (to_states, to_scale, to_classes, to_bias)
        ctx.save_for_backward(*(gradient / weights for gradient in gradients))
        return total / weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = (part * gradient for part in ctx.saved_tensors)
        return (*parts, None, None, None, None)


def chunked_cross_entropy(
    states: Tensor,
    scale: Tensor,
    classes: Tensor,
    bias: Tensor,
    *,
    targets: Tensor,
    target_weights: Tensor,
    chunks: Iterable[Chunk],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the mean cross-entropy under softmax(h Eᵀ + b + Σ_s λ_s C_s) without keeping logits.

    `states` h [T, d], `scale` λ [T, S], `classes` E [C, d], `bias` b [C] and `target_weights` [T]
    of the rows in the mean are float32, `targets` int64 [T]; `chunks` cover the rows. Matrix
    products are in `dtype`, sums in float32.
    """
    loss = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, scale, classes, bias, targets, target_weights, chunks, dtype
    )
    return cast(Tensor, loss)


class SoftmaxItems(NamedTuple):
    """The items in the softmax's denominator, one per column."""

    rows: Tensor  # int64 [C] item rows
    column: Tensor | None  # int64 [N + 1] column of each item, C if it has none; None = the rows
    correction: Tensor  # [C] log of how many items each stands for

    def columns(self, items: Tensor) -> Tensor:
        return items if self.column is None else self.column[items]


def softmax_items(items: int, targets: Tensor, full: int, negatives: int) -> SoftmaxItems:
    """Select all items of a catalogue up to `full`, else the targets and sampled negatives.

    targets int64 [any] are item rows; at most `negatives` others are sampled.
    """
    if items <= full:
        return SoftmaxItems(torch.arange(items), None, torch.zeros(items))
    # Two strata: all of the batch's targets, and a uniform sample of the rest weighted by its
    # sampling rate. The estimate of the partition function is unbiased.
    targets = torch.unique(targets)
    others = np.ones(items, dtype=np.bool_)
    others[targets.cpu().numpy()] = False
    rest = np.flatnonzero(others)
    generator = np.random.default_rng(int(torch.randint(2**62, ())))
    drawn = generator.choice(rest, min(negatives, len(rest)), replace=False)
    rows = torch.cat([targets, torch.from_numpy(drawn).to(targets.device)])
    column = torch.full((items + 1,), len(rows), dtype=torch.int64)
    column[rows] = torch.arange(len(rows))
    correction = torch.zeros(len(rows))
    correction[len(targets) :] = math.log(len(rest) / len(drawn)) if len(drawn) else 0.0
    return SoftmaxItems(rows, column, correction)


def sample_columns(logits: Tensor, own: Tensor, valid: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sample columns for each window in proportion to their probability, all its targets included.

    Each column is drawn independently with a chance near its mean probability in the window, and
    weighted by the inverse: the estimate of the partition function is unbiased (Horvitz and
    Thompson 1952), and of low variance since likely items are nearly always drawn.

    logits [B, L, C]; `own` int64 [B, L] are the targets' columns, C may stand where `valid` [B, L]
    is False; `count` other columns per window are expected, about. Returns columns int64 [B, P] and
    the logarithm of their weights [B, P], `MASKED_LOGIT` in the padding.
    """
    size = logits.shape[2]
    share = torch.softmax(logits, -1).mul_(valid[:, :, None]).sum(1)
    share /= valid.sum(1)[:, None].clamp(min=1)
    chance = (count * (0.9 * share + 0.1 / size)).clamp(max=1)
    # Any column may be certain beside the targets: its weight is then 1.
    certain = torch.where(valid, own, own[:, :1]).clamp(max=size - 1)
    chance.scatter_(1, certain, 1.0)
    taken = torch.rand(chance.shape) < chance
    width = int(taken.sum(1).max())
    order = torch.argsort(taken.int(), dim=1, descending=True, stable=True)[:, :width]
    weight = -torch.log(chance.gather(1, order))
    return order, weight.masked_fill(~taken.gather(1, order), MASKED_LOGIT)


def seen_columns(batch: WindowBatch, items: SoftmaxItems, own: Tensor) -> Tensor:
    """Mark the columns that a user has seen by each position, bool [B, L, C].

    The targets' own columns int64 [B, L] are not marked.
    """
    width, (count, length) = len(items.rows), batch.inputs.shape
    first = torch.full((count, width + 1), length)  # the position that first saw a column
    position = torch.arange(length).expand(count, -1)
    first.scatter_reduce_(1, items.columns(batch.inputs), position, "amin")
    seen = first[:, None] <= batch.newest_inputs()[..., None]  # (B, L, C + 1)
    return seen.scatter_(2, own[:, :, None], False)[:, :, :width]


CHUNK_LOGITS = 640_000  # logits at once, few enough to stay in the cache
ATTENTION_SAMPLE = 256  # items drawn for each window beside its targets


class TrainingStep(NamedTuple):
    batch: WindowBatch
    items: SoftmaxItems  # C items of the softmax
    keep_id: Tensor  # bool [N], items that keep their id in this step
    vectors: Tensor  # [C, dim] of the softmax's items
    prior: Tensor  # [C] popularity and sampling correction


class AttendedRows(NamedTuple):
    """Keys, values and queries of the prefixes of B windows of L events."""

    keys: Tensor  # [B, H, L, d]
    values: Tensor  # [B, H, L, d]
    users: Tensor  # [B, L, dim] the user state of each prefix
    queries: Tensor  # [B, H, L, d] the users' part of the queries


class TrainingLosses:
    """Losses of batches of windows over one log, each a `models.training.fit.LossFunction`.

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
        """Attend from each prefix by its user's query only: r_t [B, L, dim]."""
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
        """Transitions + prior at each position, [B, L, C], from user states."""
        logits = step.prior.expand(*users.shape[:2], -1)
        scales = self._count_scales(users).unbind(-1)
        for scale, counts in zip(scales, self._log_counts(step), strict=True):
            logits = logits + scale[..., None] * counts.view_as(logits)
        return logits

    def _prefix_bias(self, batch: WindowBatch, rows: AttendedRows) -> Tensor:
        """The scores of each prefix without the target, [B, H, L, L]; -inf hides a row."""
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
        """The factor of each of `_log_counts`, [..., S], from user states [..., dim]."""
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
