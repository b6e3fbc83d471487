"""Trains a recommender on an event log, with validation, early stopping and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from models.compute.data_parallel import SINGLE_PROCESS, DataParallelGroup
from models.compute.device import training_device
from models.data.interactions import Interactions
from models.evaluation.splits import Holdout
from models.recommender.recommender import RecommenderConfig
from models.training.checkpoint import Checkpoint
from models.training.log_profile import prediction_task
from models.training.train_config import TrainConfig
from models.training.training_run import TrainingProgress, TrainingResult, TrainingRun


def fit(
    log: Interactions,
    content: NDArray[np.float32],
    *,
    model_config: RecommenderConfig,
    train_config: TrainConfig,
    validation: Holdout | None = None,
    every_event: Interactions | None = None,
    seed: int = 0,
    progress: Callable[[TrainingProgress], None] | None = None,
    save: Callable[[bytes], None] | None = None,
    resume: bytes | None = None,
    group: DataParallelGroup = SINGLE_PROCESS,
) -> TrainingResult:
    """Train a recommender by full cross-entropy over the catalogue at every event.

    First everything but the target's part of the queries, by the exact softmax; then the attention
    with the target in its queries, by a sampled softmax and with everything else frozen. Beyond
    `train_config.full_softmax_items` items the partition function of the first is estimated from
    uniform negatives and the batch's own targets, each stratum with its exact weight.

    Given `every_event`, the best epoch's model is at last trained on that log, with the counts of
    that log, for `train_config.final_epochs` epochs: in a short history the validation case is much
    of what there is to learn, and the newest.

    Args:
        log: the training events.
        content: text embeddings of all items [log.n_items, d]; zero rows for items without text.
        model_config: its event types and prediction task are replaced by those of the log and the
            validation cases.
        train_config: hyperparameters.
        validation: cases that choose the epoch; without them the last epoch is taken.
        every_event: the training events and the validation cases, over the same items.
        seed: the same seed, data, thread count and world size give the same model.
        progress: called after every step, on rank zero alone.
        save: called after every epoch with bytes for `resume`, on rank zero alone.
        resume: a checkpoint, to continue to the same model as an uninterrupted training.
        group: the data-parallel processes. Each is called with the same arguments, and a share of
            every batch is its own; or, where the logs are shards, each with the events and cases of
            its own users.

    Raises:
        ValueError: if no user has two events, the later of them liked; if content or
            `model_config` do not fit the log; if content is not finite or a weight not above 0.
        CheckpointError: if `resume` is damaged or of another training.
    """
    width = model_config.content_dim
    if content.shape != (log.n_items, width):
        raise ValueError(f"content must be [{log.n_items}, {width}], got {list(content.shape)}")
    if not np.isfinite(content).all():
        raise ValueError("content must be finite")
    if model_config.n_items != log.n_items:
        raise ValueError(f"the model has {model_config.n_items} items, the log {log.n_items}")
    if every_event is not None and every_event.n_items != log.n_items:
        raise ValueError(f"every_event has {every_event.n_items} items, the log {log.n_items}")
    known, shards = log if every_event is None else every_event, log.shards
    if shards.count > 1 and (shards.index, shards.count) != (group.rank, group.world_size):
        raise ValueError(f"shard {shards.index} of {shards.count} is not that of {group}")
    model_config = model_config.with_event_types(
        shards.max(known.n_types),
        dislike_type=known.dislike_type,
        has_dislikes=shards.any(bool(known.disliked.any())),
    )
    model_config = replace(model_config, **prediction_task(log, validation)._asdict())
    train_config = train_config.for_next_basket() if model_config.next_basket else train_config
    train_config = train_config.divided(has_final=every_event is not None)
    if shards.any(bool(np.any(log.weights <= 0))):
        raise ValueError("weights must be greater than 0: they enter as their logarithm")
    if not shards.any(bool(np.any(~log.disliked & (log.positions > 0)))):
        raise ValueError("no user has two events: there is nothing to learn an order from")
    device = training_device(group.rank)
    on_gpu = device.type == "cuda"
    # A default device costs every call a little, so the context is entered for a GPU only.
    with torch.random.fork_rng([device] if on_gpu else []), device if on_gpu else nullcontext():
        torch.manual_seed(seed)
        run = TrainingRun(
            log,
            content,
            model_config,
            train_config,
            validation,
            every_event,
            seed,
            progress,
            save,
            group,
        )
        return run.fit(None if resume is None else Checkpoint.from_bytes(resume))
