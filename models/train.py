"""`fit`: trains a recommender on an event log, with validation, early stop and progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.data import Interactions
from models.evaluate import Metrics, evaluate
from models.recommender import Recommender, RecommenderConfig
from models.splits import Holdout

_DISTANT = -1e30  # a logit no softmax sees; finite, so that gradients stay finite


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train. Every default was chosen on validation data."""

    epochs: int = 20
    patience: int = 3  # validations without a better NDCG before training stops
    validate_every: int = 2  # epochs
    validation_users: int = 3_000  # at most, drawn once under the seed
    learning_rate: float = 1e-3
    warmup: int = 100  # steps
    batch_tokens: int = 1_600  # padded positions
    attention_share: float = 0.25  # share of a batch's windows at which the whole score is trained
    sequence_loss: float = 0.5  # share of the loss that the encoder earns alone, on every window
    drop_id: float = 0.1  # items that lose their id for one step, so that text alone works
    request_time: float = 0.5  # share of windows that see the target's own time
    average: float = 0.998  # decay of the running mean of the weights, which is what is served
    negatives: int = 4_096  # sampled beyond `full_softmax` items
    full_softmax: int = 20_000

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def for_size(events: int, items: int) -> TrainConfig:
    """The configuration for a data set of this size.

    The attention part costs in proportion to events times items, so that larger sets train it on a
    smaller share of their windows and for fewer epochs: about the same number of steps each.
    """
    if events <= 300_000:
        return TrainConfig()
    work = (events / 300_000) * max(1.0, min(items, 20_000) / 2_000)
    return TrainConfig(
        epochs=max(4, round(16 / work**0.5)),
        validate_every=1,
        batch_tokens=3_200,
        attention_share=max(0.06, 0.25 / work**0.5),
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands; handed to the callback after every step."""

    epoch: int  # from 1
    epochs: int
    step: int  # of the epoch, from 1
    steps: int
    loss: float  # mean of the epoch so far
    seconds: float  # since the start
    validation: Metrics | None  # the latest


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained model and how it got there."""

    model: Recommender  # the best epoch's weights, in eval mode
    validation: Metrics | None
    epoch: int  # the one whose weights these are
    history: list[dict[str, float]]
    seconds: float


class RecommenderRanker:
    """A recommender as a `Ranker` of the evaluation: scores the whole catalogue for each user."""

    name = "heed"

    def __init__(self, model: Recommender, content: NDArray[np.float32]) -> None:
        self._model = model
        items = model.config.items
        with torch.inference_mode():
            self._tables = model.tables(torch.arange(items), torch.from_numpy(content))

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """Scores [B, n_items] of each user's next event; zero but for the prior without history."""
        model, tables = self._model, self._tables
        if history.n_items != model.config.items:
            raise ValueError(
                f"the model ranks {model.config.items} items, the log has {history.n_items}"
            )
        order = np.argsort(history.lengths[users], kind="stable")
        out = np.empty((len(users), model.config.items), dtype=np.float32)
        with torch.inference_mode():
            # Some sixteen users of like length at a time; of no users there is no part.
            for part in np.array_split(order, -(-len(order) // 16)) if len(order) else ():
                window = _last_window(history, users[part], model.config.window)
                events, times, weights, lengths = (torch.from_numpy(column) for column in window)
                last = lengths - 1  # (B,)
                batch = torch.arange(len(part))
                summary = model.summaries(tables.vectors[events], times)[batch, last.clamp(min=0)]
                asked = times[batch, last.clamp(min=0)]
                if request_times is not None:
                    asked = torch.from_numpy(request_times[part])
                position = torch.arange(events.shape[1])
                distance = last[:, None, None] - position  # (B, 1, L)
                bias = model.recency(distance, asked[:, None, None] - times[:, None])[:, :, 0]
                bias = bias + torch.log(weights)[:, None]
                bias = bias.masked_fill(distance < 0, -math.inf)  # (B, H, L)
                keys = tables.keys[:, events].transpose(0, 1)  # (B, H, L, d)
                values = tables.values[:, events].transpose(0, 1)
                total = tables.prior + model.target_attention(tables, keys, values, bias)
                total += (lengths > 0)[:, None] * (summary @ tables.vectors.T)
                out[part] = total.numpy()
        return out


def fit(
    log: Interactions,
    content: NDArray[np.float32],
    *,
    shape: RecommenderConfig | None = None,
    config: TrainConfig = TrainConfig(),
    validation: Holdout | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Fitted:
    """Train a recommender by full cross-entropy over the catalogue at every event.

    Beyond `config.full_softmax` items the partition function is estimated from uniform negatives
    and the batch's own positives, each stratum with its exact weight.

    Args:
        log: the events to learn from.
        content: text embeddings of all items [log.n_items, d]; zero rows for items without text.
        shape: the model's shape; by default one for this number of items and this d.
        validation: cases to choose the epoch on; without them the last epoch is taken.
        seed: the same seed, data and thread count give the same model.

    Raises:
        ValueError: when no user has two events, content or shape do not fit the log, content is
            not finite, or a weight is not greater than 0.
    """
    width = shape.content if shape else content.shape[-1]
    if content.shape != (log.n_items, width):
        raise ValueError(f"content must be [{log.n_items}, {width}], got {list(content.shape)}")
    if not np.isfinite(content).all():
        raise ValueError("content must be finite")
    shape = shape or RecommenderConfig(items=log.n_items, content=width)
    if shape.items != log.n_items:
        raise ValueError(f"the shape has {shape.items} items, the log {log.n_items}")
    if np.any(log.weights <= 0):
        raise ValueError("weights must be greater than 0: they enter as their logarithm")
    if not np.any(log.lengths >= 2):
        raise ValueError("no user has two events: there is nothing to learn an order from")
    started = time.monotonic()
    generator = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Recommender(shape)
        trainer = _Trainer(model, log, content, config, generator)
        if validation is not None and len(validation) > config.validation_users:
            chosen = np.zeros(len(validation), dtype=np.bool_)
            chosen[generator.permutation(len(validation))[: config.validation_users]] = True
            validation = validation.where(chosen)
        best: tuple[float, int, dict[str, Tensor], Metrics | None] | None = None
        metrics: Metrics | None = None
        history: list[dict[str, float]] = []
        stale = 0
        for epoch in range(1, config.epochs + 1):
            loss = 0.0
            for step, steps, loss in trainer.epoch():
                if progress is not None:
                    seconds = time.monotonic() - started
                    progress(Progress(epoch, config.epochs, step, steps, loss, seconds, metrics))
            record = {"epoch": float(epoch), "loss": loss}
            due = epoch % config.validate_every == 0 or epoch == config.epochs
            if validation is not None and due:
                averaged = trainer.averaged()
                metrics = evaluate(RecommenderRanker(averaged, content), validation)
                record |= {"hr": metrics.hr, "ndcg": metrics.ndcg}
                if best is None or metrics.ndcg > best[0]:
                    state = {k: v.clone() for k, v in averaged.state_dict().items()}
                    best, stale = (metrics.ndcg, epoch, state, metrics), 0
                else:
                    stale += 1
            history.append(record)
            if stale >= config.patience:
                break
        final = trainer.averaged()
    if best is not None:
        final.load_state_dict(best[2])
    return Fitted(
        model=final.eval(),
        validation=best[3] if best else None,
        epoch=best[1] if best else config.epochs,
        history=history,
        seconds=time.monotonic() - started,
    )


class _Trainer:
    """Optimiser, running mean of the weights and batches of one training run."""

    def __init__(
        self,
        model: Recommender,
        log: Interactions,
        content: NDArray[np.float32],
        config: TrainConfig,
        generator: np.random.Generator,
    ) -> None:
        self.model, self.log, self.config, self.generator = model, log, config, generator
        self.content = torch.from_numpy(content)
        self.optimiser = torch.optim.AdamW(
            model.parameters(), config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.mean = torch.optim.swa_utils.AveragedModel(
            model,
            multi_avg_fn=lambda kept, new, count: torch._foreach_lerp_(
                kept, new, 1 - min(config.average, (1 + int(count)) / (10 + int(count)))
            ),
        )
        self.step = 0
        self.steps = config.epochs * max(1, len(self._batches()))

    def averaged(self) -> Recommender:
        """The running mean of the weights, in eval mode."""
        mean = cast(Recommender, self.mean.module)
        return mean.eval()

    def epoch(self) -> Iterator[tuple[int, int, float]]:
        """Train one pass; yields (step, steps, mean loss so far)."""
        self.model.train()
        total = weight = 0.0
        batches = self._batches()
        for number, batch in enumerate(batches, 1):
            loss, positions = self._loss(batch)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in self.optimiser.param_groups:
                group["lr"] = self.config.learning_rate * self._schedule()
            self.optimiser.step()
            self.mean.update_parameters(self.model)
            self.step += 1
            total, weight = total + float(loss.detach()) * positions, weight + positions
            yield number, len(batches), total / weight

    def _schedule(self) -> float:
        """Linear warm-up, then a cosine to 5 %."""
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / self.steps)))
        return min(1.0, (self.step + 1) / self.config.warmup) * (0.05 + 0.95 * decay)

    # -------------------------------------------------------------- batches

    def _windows(self) -> NDArray[np.int64]:
        """Each history tiled backwards from its end into (first event, end), at random lengths."""
        longest = self.model.config.window + 1  # inputs and one more target
        spans: list[tuple[int, int]] = []
        for user in np.flatnonzero(self.log.lengths >= 2):
            begin, end = int(self.log.offsets[user]), int(self.log.offsets[user + 1])
            while end - begin >= 2:
                first = max(begin, end - longest)
                spans.append((first, end))
                if first == begin:
                    break
                # The next window overlaps this one at random, so that targets early in a window,
                # which see little history, see more of it in another epoch.
                end -= int(self.generator.integers(longest // 2, longest))
        return np.array(spans, dtype=np.int64)

    def _batches(self) -> list[NDArray[np.int64]]:
        """Windows of like length together, at most `batch_tokens` padded positions, shuffled."""
        spans = self._windows()
        lengths = spans[:, 1] - spans[:, 0]
        jitter = self.generator.uniform(-2, 2, len(spans))
        spans = spans[np.argsort(lengths + jitter, kind="stable")]
        batches: list[NDArray[np.int64]] = []
        start = 0
        longest = 0
        for at, (first, end) in enumerate(spans):
            grown = max(longest, int(end - first) - 1)
            if at > start and grown * (at - start + 1) > self.config.batch_tokens:
                batches.append(spans[start:at])
                start, grown = at, int(end - first) - 1
            longest = grown
        batches.append(spans[start:])
        return [batches[i] for i in self.generator.permutation(len(batches))]

    def _loss(self, spans: NDArray[np.int64]) -> tuple[Tensor, int]:
        """Cross-entropy of one batch and its number of positions."""
        model, config = self.model, self.config
        items, times, weights, lengths = _pad(self.log, spans[:, 0], spans[:, 1])
        inputs, targets = torch.from_numpy(items[:, :-1]), torch.from_numpy(items[:, 1:])
        seen_at, target_at = torch.from_numpy(times[:, :-1]), torch.from_numpy(times[:, 1:])
        width = inputs.shape[1]
        real = torch.arange(width) < torch.from_numpy(lengths - 1)[:, None]  # (B, L)

        catalogue = self._candidates(targets[real])
        column = torch.full((self.log.n_items + 1,), len(catalogue.rows), dtype=torch.int64)
        column[catalogue.rows] = torch.arange(len(catalogue.rows))
        keep = torch.rand(self.log.n_items) >= config.drop_id
        vectors = model.tower(catalogue.rows, self.content[catalogue.rows], keep[catalogue.rows])
        tables = model.project(vectors, model.prior[catalogue.rows])
        prior = tables.prior + catalogue.correction
        events = model.tower(inputs, self.content[inputs], keep[inputs])

        summary = model.summaries(events, seen_at)
        sequence = summary @ vectors.T + prior  # (B, L, C)
        own = column[targets]  # (B, L) the target's column
        hidden = self._seen(column[inputs], own, len(catalogue.rows))  # (B, L, C)

        # The attention part costs several times the rest, so that a few windows carry it a batch.
        some = torch.randperm(len(spans))[: math.ceil(config.attention_share * len(spans))]
        normed = model.norm(events[some])
        keys = model.cross.keys(normed)
        values = keys if model.cross.tied else model.cross.values(normed)
        asked = torch.where(
            torch.rand(len(some), 1) < config.request_time, target_at[some], seen_at[some]
        )
        position = torch.arange(width)
        distance = position[:, None] - position  # (L, L)
        bias = model.recency(
            distance, asked[:, :, None] - seen_at[some, None], visible=distance >= 0
        )
        bias = bias + torch.log(torch.from_numpy(weights[:, :-1]))[some, None, None]
        whole = sequence[some] + model.target_attention_prefixes(tables, keys, values, bias)
        loss = _entropy(whole, hidden[some], own[some], real[some])
        if model.encoder is not None:
            alone = _entropy(sequence, hidden, own, real)
            loss = torch.lerp(loss, alone, config.sequence_loss)
        return loss, int(real.sum())

    def _candidates(self, targets: Tensor) -> _Candidates:
        """Which items stand in the softmax's denominator, and log of how many each stands for."""
        items = self.log.n_items
        if items <= self.config.full_softmax:
            return _Candidates(torch.arange(items), torch.zeros(items))
        # Two strata: the batch's positives, all of them; the rest, a uniform sample that is
        # weighted by its share. The estimate of the partition function is unbiased.
        positives = torch.unique(targets)
        others = np.ones(items, dtype=np.bool_)
        others[positives.numpy()] = False
        rest = np.flatnonzero(others)
        drawn = torch.from_numpy(
            self.generator.choice(rest, min(self.config.negatives, len(rest)), replace=False)
        )
        each = math.log(len(rest) / len(drawn)) if len(drawn) else 0.0
        correction = torch.cat([torch.zeros(len(positives)), torch.full((len(drawn),), each)])
        return _Candidates(torch.cat([positives, drawn]), correction)

    @staticmethod
    def _seen(inputs: Tensor, own: Tensor, columns: int) -> Tensor:
        """True at the columns a user has already seen by each position, but for the target itself.

        inputs, own: columns [B, L], `columns` where the item is not a candidate -> [B, L, columns].
        """
        batch, length = inputs.shape
        position = torch.arange(length)
        first = torch.full((batch, columns + 1), length)  # the position that first saw the column
        first.scatter_reduce_(1, inputs, position.expand(batch, -1), "amin")
        seen = first[:, None] <= position[:, None]  # (B, L, columns + 1)
        return seen.scatter_(2, own[:, :, None], False)[:, :, :columns]


def _entropy(logits: Tensor, hidden: Tensor, own: Tensor, real: Tensor) -> Tensor:
    """Mean cross-entropy over the real positions; hidden columns are not in the denominator.

    logits and hidden [B, L, C], own [B, L] the target's column, real [B, L].
    """
    masked = logits[real].masked_fill(hidden[real], _DISTANT)
    return nn.functional.cross_entropy(masked, own[real])


@dataclass(frozen=True, slots=True)
class _Candidates:
    rows: Tensor  # int64 [C]
    correction: Tensor  # [C] added to the logits


class Spans(NamedTuple):
    """Stretches of histories, [B, longest] each, oldest first."""

    items: NDArray[np.int64]
    timestamps: NDArray[np.int64]
    weights: NDArray[np.float32]
    lengths: NDArray[np.int64]  # [B]


def _pad(log: Interactions, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Spans:
    """Spans of the log as rectangles; padding follows the events.

    The padding repeats the span's last time, so that ages stay small; its item is row 0.
    """
    lengths = ends - begins
    width = max(1, int(lengths.max(initial=1)))
    place = np.arange(width)
    real = place < lengths[:, None]
    index = np.minimum(begins[:, None] + place, np.maximum(begins, ends - 1)[:, None])
    if not len(log):
        nothing = np.zeros(index.shape, dtype=np.int64)
        return Spans(nothing, nothing, np.ones(index.shape, dtype=np.float32), lengths)
    index = np.minimum(index, len(log) - 1)
    items = np.where(real, log.items[index], 0).astype(np.int64)
    return Spans(items, log.timestamps[index], log.weights[index], lengths)


def _last_window(history: Interactions, users: NDArray[np.int32], window: int) -> Spans:
    ends = history.offsets[users + 1]
    return _pad(history, np.maximum(history.offsets[users], ends - window), ends)
