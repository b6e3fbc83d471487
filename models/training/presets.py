"""Hyperparameters of a training, and presets of them for a log of a given size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.splits import Holdout
from models.recommender.recommender import RecommenderConfig
from models.training.log_profile import prediction_task


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Hyperparameters of a training. Every default was chosen on validation data."""

    epochs: int = 20  # of all but the target's part of the queries; without an encoder, of all
    attention_epochs: int = 1  # of the target attention, with everything else frozen
    final_epochs: int = 2  # on all events, the validation cases included
    patience: int = 3  # validations without a better NDCG before training stops
    validate_every: int = 2  # epochs
    validation_users: int = 3_000  # at most, drawn once under the seed
    weight_cases: int = (
        12_000  # at most, drawn as these: they choose the weights of the score's parts
    )
    learning_rate: float = 1e-3
    warmup_steps: int = 200
    # Padded positions. On MovieLens 1M, four epochs of these rank better than seven of 6,400
    # positions with the model of `quick`, and twelve as well as 32 with that of `best`.
    batch_tokens: int = 1_600
    basket_batch_tokens: int = 1_600  # the same of a next-basket model
    attention_batch_tokens: int = 1_600  # padded positions while the target attention is trained
    id_dropout: float = 0.1  # share of items that lose their id in a step, so that text must work
    request_time_share: float = 0.75  # of windows that see their targets' times, as a service does
    item_rows_share: float = 0.25  # of windows whose older rows have no state, as in long histories
    ema_decay: float = 0.998  # of the exponential moving average of the weights, which is served
    sampled_negatives: int = 4_096  # for catalogues beyond `full_softmax_items`
    full_softmax_items: int = 5_000
    asked_epochs: int | None = None  # of all stages together; None: each stage has its own number

    @property
    def total_epochs(self) -> int:
        return self.asked_epochs or self.epochs + self.attention_epochs + self.final_epochs

    def divided(self, *, has_final: bool) -> TrainConfig:
        """Return the hyperparameters with the epochs that were asked divided among the stages.

        The later stages have no more than their own numbers, and a third of all at most.
        """
        if self.asked_epochs is None:
            return self if has_final else replace(self, final_epochs=0)
        most = self.asked_epochs // 3
        attention = min(self.attention_epochs, most)
        final = min(self.final_epochs, most) if has_final else 0
        epochs = self.asked_epochs - attention - final
        return replace(self, epochs=epochs, attention_epochs=attention, final_epochs=final)

    def for_next_basket(self) -> TrainConfig:
        """Return the hyperparameters for a next-basket model.

        The targets of one basket share one prediction, so a batch of the same size has fewer:
        batches are smaller, and with more steps an epoch half of the epochs suffice. After the best
        epoch the NDCG falls, and one epoch of the attention is as good as two.
        """
        return replace(
            self,
            epochs=max(1, self.epochs // 2),
            attention_epochs=min(1, self.attention_epochs),
            patience=min(2, self.patience),
            validate_every=1,
            batch_tokens=self.basket_batch_tokens,
        )


PresetName = Literal["quick", "best"]
PRESET_NAMES = get_args(PresetName)

SMALL_LOG = 300_000  # events, up to which the small model is as good as the large one
_QUICK_TOKENS = 7_000_000  # inputs in all epochs, at a catalogue of `_ITEMS`
_BEST_TOKENS = 12_000_000
_ITEMS = 3_500  # at which the loss takes 0.6 of the cost; it grows in proportion
_EPOCHS = 20
_FEW = 50_000  # events, below which a model overfits sooner and has time for more epochs
_SPARSE = 20  # events an item, below which the best epoch comes before the tenth
_SPARSE_EPOCHS = 10
_QUICK_NEGATIVES = 1_024  # a quarter of the default was as good on Amazon Beauty, in half the time
_STEPS = 60  # of an epoch at least: small batches matter more than full ones
_SPARSE_STEPS = 120
_TRANSITIONS_PER_ITEM = 512  # at most
_TRANSITIONS = 16_000_000  # in all: 8 bytes each in the model, and as many again in training
_MIN_BATCH_TOKENS = 400  # padded inputs
_MIN_BASKET_BATCH_TOKENS = 100
# Times as many steps an epoch in baskets, since the targets of a basket share one prediction.
_BASKET_STEPS = 4
# Cost of updating one item's vectors, where an input of a small catalogue costs 1. Each step
# updates those of all items.
_UPDATE_COST = 0.004


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPlan:
    """Events, texts and settings: with one thread count and world size, a plan gives one model."""

    log: Interactions  # the training events
    content: NDArray[np.float32]  # [log.n_items, d] text embeddings; zero rows for items without
    model_config: RecommenderConfig
    train_config: TrainConfig
    validation: Holdout | None = None  # cases that choose the epoch; None = the last one
    every_event: Interactions | None = None  # `log` and the validation cases, over the same items
    seed: int = 0

    def checked(self) -> TrainingPlan:
        """Return the plan with event types, prediction task and epochs as its log has them.

        Raises the `ValueError`s of `fit`.
        """
        log, config, every_event = self.log, self.model_config, self.every_event
        width, content = config.content_dim, self.content
        if content.shape != (log.n_items, width):
            raise ValueError(f"content must be [{log.n_items}, {width}], got {list(content.shape)}")
        if not np.isfinite(content).all():
            raise ValueError("content must be finite")
        if config.n_items != log.n_items:
            raise ValueError(f"the model has {config.n_items} items, the log {log.n_items}")
        if every_event is not None and every_event.n_items != log.n_items:
            raise ValueError(f"every_event has {every_event.n_items} items, the log {log.n_items}")
        known, shards = log if every_event is None else every_event, log.shards
        config = config.with_event_types(
            shards.max(known.n_types),
            dislike_type=known.dislike_type,
            has_dislikes=shards.any(bool(known.disliked.any())),
        )
        config = replace(config, **prediction_task(log, self.validation)._asdict())
        settings = self.train_config
        settings = settings.for_next_basket() if config.next_basket else settings
        if shards.any(bool(np.any(log.weights <= 0))):
            raise ValueError("weights must be greater than 0: they enter as their logarithm")
        if not shards.any(bool(np.any(~log.disliked & (log.positions > 0)))):
            raise ValueError("no user has two events: there is nothing to learn an order from")
        settings = settings.divided(has_final=every_event is not None)
        return replace(self, model_config=config, train_config=settings)


@dataclass(frozen=True, slots=True)
class Preset:
    name: str
    dim: int
    blocks: int
    dropout: float
    transitions_per_item: int
    train_config: TrainConfig
    small_log: bool = False  # see `RecommenderConfig`

    def model_config(self, items: int, content: int) -> RecommenderConfig:
        """Return the configuration for `items` with text embeddings [content]."""
        return RecommenderConfig(
            n_items=items,
            content_dim=content,
            dim=self.dim,
            blocks=self.blocks,
            dropout=self.dropout,
            transitions_per_item=self.transitions_per_item,
            small_log=self.small_log,
        )

    def plan(
        self,
        log: Interactions,
        content: NDArray[np.float32],
        validation: Holdout | None,
        *,
        every_event: Interactions | None = None,
        seed: int = 0,
    ) -> TrainingPlan:
        config = self.model_config(log.n_items, content.shape[1])
        return TrainingPlan(
            log, content, config, self.train_config, validation, every_event=every_event, seed=seed
        )

    def as_trained(self, log: Interactions, cases: Holdout | None) -> Preset:
        """Return the preset with the hyperparameters that a training on a log ends up with.

        Reports show these; `fit` is given the preset's own, and changes them in the same way.
        Without `cases`, which choose the epoch, nothing is held out to learn at last.
        """
        config = self.train_config
        if prediction_task(log, cases).next_basket:
            config = config.for_next_basket()
        return replace(self, train_config=config.divided(has_final=cases is not None))

    def __str__(self) -> str:
        size = f"{self.dim} dimensions, {self.blocks} blocks"
        return f"{self.name} ({size}, {self.train_config.total_epochs} epochs at most)"


def choose_preset(
    events: int, items: int, name: str | None = None, *, epochs: int | None = None
) -> Preset:
    """Choose the preset for a log of some events and items.

    Without a name, it is `quick` up to `SMALL_LOG` events and `best` beyond. Given `epochs` are
    those of all stages together, instead of the preset's. Raises ValueError for another name.
    """
    if name is None:
        name = "quick" if events <= SMALL_LOG else "best"
    if name not in PRESET_NAMES:
        raise ValueError(f"preset must be one of {', '.join(PRESET_NAMES)}, not {name!r}")
    tokens = _QUICK_TOKENS if name == "quick" else _BEST_TOKENS
    few, sparse = events < _FEW, events < _SPARSE * items
    defaults = TrainConfig()
    negatives = _QUICK_NEGATIVES if name == "quick" else defaults.sampled_negatives
    steps = _SPARSE_STEPS if sparse else _STEPS
    batch = min(defaults.batch_tokens, max(_MIN_BATCH_TOKENS, events // steps))
    basket_batch = max(_MIN_BASKET_BATCH_TOKENS, events // (_BASKET_STEPS * steps))
    # Beyond that many items the softmax is over a sample and the batch's own targets.
    columns = items if items <= defaults.full_softmax_items else min(items, negatives + batch)
    share = 0.4 + 0.6 * columns / _ITEMS + _UPDATE_COST * items / batch
    fitting = round(tokens / max(1.0, share) / max(1, events))
    most = 2 * _EPOCHS if few else _SPARSE_EPOCHS if sparse else _EPOCHS
    config = TrainConfig(
        epochs=min(most, max(2, fitting)),
        asked_epochs=epochs,
        # Validation takes a third of an epoch, and a model of a large log overfits late if ever.
        validate_every=2 if events <= SMALL_LOG else 4,
        batch_tokens=batch,
        basket_batch_tokens=min(defaults.basket_batch_tokens, basket_batch),
        sampled_negatives=negatives,
    )
    config = replace(
        config, attention_batch_tokens=min(config.attention_batch_tokens, config.batch_tokens)
    )
    dropout = 0.5 if few or sparse else 0.3
    transitions, small = max_transitions_per_item(items), events <= SMALL_LOG
    if name == "quick":
        # An epoch of the attention takes as long as two of the rest.
        config = replace(config, attention_epochs=2 if events <= SMALL_LOG else 1)
        return Preset("quick", 64, 2, dropout, transitions, config, small)
    return Preset("best", 128, 3, dropout, transitions, config, small)


def max_transitions_per_item(items: int) -> int:
    return min(_TRANSITIONS_PER_ITEM, max(1, _TRANSITIONS // max(1, items)))
