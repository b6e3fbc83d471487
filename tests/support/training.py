"""Small things to train: shapes, settings, texts and logs with something to learn in them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.recommender.co_occurrence import count_transitions
from models.recommender.recent_popularity import RecentPopularity
from models.recommender.recommender import Recommender, RecommenderConfig
from models.training.fit import TrainingResult, fit
from models.training.log_profile import has_repeat_consumption
from models.training.presets import TrainConfig, TrainingPlan
from tests.support.small import DAY, DIMENSION, SECOND, encode, random_model

# Everything trains in a second or two: small batches, long steps, a short memory of weights.
QUICK = TrainConfig(
    epochs=12,
    validate_every=1,
    learning_rate=1e-2,
    warmup_steps=10,
    batch_tokens=80,
    attention_batch_tokens=80,
    id_dropout=0.0,
    ema_decay=0.9,
)


def tiny(items: int, **more: Any) -> RecommenderConfig:
    """A model of one block; what is named is changed."""
    shape: dict[str, Any] = {"dim": 16, "heads": 2, "blocks": 1, "window": 16, "dropout": 0.0}
    return RecommenderConfig(
        **{"n_items": items, "content_dim": DIMENSION, "transitions_per_item": 4} | shape | more
    )


def content(items: int) -> NDArray[np.float32]:
    """A text of its own for every item, as vectors."""
    return encode([f"title {n}" for n in range(items)])


def train(log: Interactions, config: TrainConfig = QUICK, **more: Any) -> TrainingResult:
    """`fit` on small texts, of the tiny shape unless another is given."""
    shape = more.pop("shape", tiny(log.n_items))
    named = {"validation", "every_event", "seed"} & more.keys()
    settings = {name: more.pop(name) for name in named}
    return fit(TrainingPlan(log, content(log.n_items), shape, config, **settings), **more)


def drawn_log(seed: int, lengths: list[int], items: int, *, again: bool = True) -> Interactions:
    """Users of these lengths, with times that repeat and weights around 1.

    again: whether a user may take an item twice.
    """
    rng = np.random.default_rng(seed)
    events = sum(lengths)
    taken = [rng.choice(items, length, replace=again) for length in lengths]
    return Interactions.from_columns(
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate(taken),
        np.sort(rng.choice([0, SECOND, 40 * SECOND, DAY, 3 * DAY], events)),
        rng.uniform(0.2, 3, events),
        n_users=len(lengths),
        n_items=items,
    )


def counted_model(seed: int, log: Interactions, *, most: int = 4, **shape: Any) -> Recommender:
    """A model of drawn weights that has counted what follows what in the log.

    It looks for what users had where they come back, unless it is told not to.
    """
    shape = {"repeat_consumption": has_repeat_consumption(log)} | shape
    model = random_model(seed, n_items=log.n_items, transitions_per_item=most, **shape)
    if most:
        lately = RecentPopularity(log).latest if model.config.next_basket else None
        model.statistics.load(
            count_transitions(log, most, model.statistics.cooccurrence_window), 2 * DAY, lately
        )
    return model
