"""A trained model over many times its items, so that large catalogues are not only random ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.catalogue.snapshot import Snapshot
from models.recommender.co_occurrence import MAX_EASE_ITEMS
from models.recommender.recommender import Recommender
from models.training.presets import max_transitions_per_item
from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.registry import Registry

_SIMILARITY = ("statistics.similar_items", "statistics.similarity_weights")
_PART = 512  # items whose distances to all others are held at once


@torch.inference_mode()
def publish_enlarged(snapshot: Snapshot, copies: int, target: Path) -> None:
    """Publish a trained model over `copies` of each of its items, in a data directory.

    Copy c of item i has the id `c:i`, the item's text, and an embedding as far from the item's as
    items are from their nearest, so that neighbourhoods are no emptier than they were. What
    followed the item follows each copy too, each follower by one of its own copies; as many are
    kept as training would keep of so many items. Similar items likewise; of more items than EASE is
    solved for, training makes no similarity part, and none is kept.
    """
    trained = snapshot.trained
    assert trained is not None
    generator = torch.Generator().manual_seed(0)
    old, n = trained.model, trained.model.config.n_items
    rows = torch.from_numpy(snapshot.catalogue.rows(trained.item_ids).astype(np.int64))
    kept = min(old.config.transitions_per_item, max_transitions_per_item(n * copies))
    similar = old.config.similar_items if n * copies <= MAX_EASE_ITEMS else 0
    model = Recommender(
        replace(old.config, n_items=n * copies, transitions_per_item=kept, similar_items=similar)
    )
    state = old.state_dict()
    noise = torch.randn(n * copies, old.config.dim, generator=generator)
    noise *= _nearest(snapshot.tables.vectors[rows]).median() / old.config.dim**0.5
    noise[:n] = 0.0

    def spread(columns: Tensor) -> Tensor:
        """Repeat items [n, K] for each copy, each item as one of its own copies."""
        columns = columns.repeat(copies, 1)
        own = torch.randint(copies, columns.shape, generator=generator, dtype=columns.dtype)
        return torch.where(columns < n, columns + n * own, n * copies)

    state |= {
        "id_embedding.weight": state["id_embedding.weight"].repeat(copies, 1) + noise,
        "prior": state["prior"].repeat(copies),
        "statistics.transition_items": spread(state["statistics.transition_items"][:, :kept]),
        "statistics.transition_sums": state["statistics.transition_sums"][:, :kept].repeat(
            copies, 1
        ),
    }
    items, weights = (state.pop(name, None) for name in _SIMILARITY)
    if similar:
        state |= zip(_SIMILARITY, (spread(items), weights.repeat(copies, 1)), strict=True)
    model.load_state_dict(state, assign=True)
    ids = tuple(f"{copy}:{id_}" for copy in range(copies) for id_ in trained.item_ids)
    made = replace(
        trained, model=model.eval(), item_ids=ids, item_counts=np.tile(trained.item_counts, copies)
    )
    Registry(target / MODELS_FOLDER).publish(made.to_files(), {"metrics": {}})


def _nearest(vectors: Tensor) -> Tensor:
    """The distance of each vector [N, d] to the nearest other, [N]."""
    found = []
    for part in torch.split(torch.arange(len(vectors)), _PART):
        distances = torch.cdist(vectors[part], vectors)
        distances[torch.arange(len(part)), part] = torch.inf
        found.append(distances.amin(1))
    return torch.cat(found)
