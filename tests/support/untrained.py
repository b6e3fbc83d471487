"""Models without training, of the shape that training gives, for speed and for bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.recommender.artifact import TrainedModel
from models.recommender.co_occurrence import TransitionCounts
from models.recommender.recommender import MAX_REQUEST_GAP, Recommender, RecommenderConfig
from service.domain.settings import Settings
from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import open_encoder


def untrained_model(items: int, *, content: int = 256, seed: int = 0, **shape: Any) -> Recommender:
    """A recommender whose items lie in clusters, and whose heads look sharply.

    Attention is then neither uniform nor a lookup, so that approximations have something to get
    wrong. `shape` is the rest of its configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Recommender(RecommenderConfig(n_items=items, content_dim=content, **shape))
        centres = torch.randn(max(1, round(items**0.5)), model.config.dim)
        own = torch.randn(items, model.config.dim)
        with torch.no_grad():
            chosen = centres[torch.randint(len(centres), (items,))]
            model.id_embedding.weight.copy_(0.1 * (chosen + 0.7 * own))
            attention, width = model.cross_attention, model.config.dim**0.5
            # Logits have a standard deviation of about 2, of which the user has the larger part.
            attention.w_q.weight.normal_(std=1 / width)
            attention.w_k.weight.normal_(std=1 / width)
            if model.state_attention is not None:
                model.state_attention.query.weight.normal_(std=1.5 / width)
            if attention.w_v is not None:
                attention.w_v.weight.normal_(std=0.6 / width)
            attention.w_o.weight.normal_(std=4 / width)  # of vectors of a length below 2
            model.prior.copy_(0.3 * torch.randn(items))
        room = (items, model.config.transitions_per_item)
        columns = torch.randint(max(1, items), room, dtype=torch.int32)
        model.statistics.load(
            TransitionCounts(columns, 10 * torch.rand(room) ** 4), MAX_REQUEST_GAP
        )
    return model.eval()


def publish_untrained(data: Path, item_ids: Sequence[str], seed: int) -> None:
    """Publish such a model of these items in a data directory."""
    encoder = open_encoder(Settings.read({}).encoder)
    model = untrained_model(len(item_ids), content=encoder.dimension, seed=seed)
    counts = np.ones(len(item_ids), np.int64)
    trained = TrainedModel(model, tuple(item_ids), counts, encoder.name, {})
    Registry(data / MODELS_FOLDER).publish(trained.to_files(), {"metrics": {}})
