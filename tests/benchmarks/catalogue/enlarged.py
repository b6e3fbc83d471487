"""A trained model over many times its items, so that large catalogues are not only random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.catalogue.catalogue import Catalogue
from models.catalogue.cow import CowArray
from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import Vocabulary
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.recommender.co_occurrence import MAX_EASE_ITEMS
from models.recommender.recommender import Recommender
from models.training.presets import max_transitions_per_item

_SIMILARITY = ("statistics.similar_items", "statistics.similarity_weights")
_PART = 512  # items whose distances to all others are held at once


@torch.inference_mode()
def enlarged(snapshot: Snapshot, copies: int, seed: int = 0) -> Snapshot:
    """A snapshot of `copies` of each trained item, without an index.

    Copy c of item i is row c·N + i of N trained items. It has the item's text, and an id as far
    from the item's as items are from their nearest, so that neighbourhoods are no emptier than
    they were. What followed the item follows each copy too, each follower by one of its own copies;
    as many are kept as training would keep of so many items. Similar items likewise; of more items
    than EASE is solved for, training makes no similarity part, and none is kept.

    Raises ValueError for a snapshot without a trained model, or with less than two trained items.
    """
    trained = snapshot.trained
    if trained is None or trained.model.config.n_items < 2:
        raise ValueError("only a trained model of two items and more can be enlarged")
    generator = torch.Generator().manual_seed(seed)
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
    empty = Catalogue.empty(snapshot.catalogue.dimension, Vocabulary(ids))
    catalogue = replace(
        empty,
        content_rows=CowArray(np.tile(snapshot.catalogue.content[rows.numpy()], (copies, 1))),
        has_content=np.tile(snapshot.catalogue.has_content[rows.numpy()], copies),
    )
    return Snapshot.build(
        snapshot.version, made, catalogue, made.item_counts, index_from=n * copies + 1
    )


def moved(
    memories: Sequence[UserMemory], snapshot: Snapshot, large: Snapshot, seed: int = 0
) -> list[UserMemory]:
    """The memories of the same users, had each of their events been on one of the item's copies.

    Args:
        memories: by `snapshot`; profiles and events of other things than trained items are gone.
        snapshot: what was enlarged.
        large: from `enlarged`.
        seed: of which copies.
    """
    generator = np.random.default_rng(seed)
    n = snapshot.trained.model.config.n_items if snapshot.trained else 0
    copies = len(large.catalogue) // max(1, n)
    rows = snapshot.trained_rows.numpy()

    def past(old: UserHistory) -> UserHistory:
        inside = (old.rows >= 0) & (old.rows < len(rows))
        item = np.where(inside, rows[np.where(inside, old.rows, 0)], -1)
        copy = generator.integers(copies, size=len(item))
        return replace(
            old,
            rows=np.where(item >= 0, item + n * copy, -1).astype(np.int32),
            vectors={},
            profile_rows=np.zeros(0, np.int32),
            profile_content=None,
        )

    return [build_memory(large, past(each.history), each.at) for each in memories]


def _nearest(vectors: Tensor) -> Tensor:
    """The distance of each vector [N, d] to the nearest other, [N]."""
    found = []
    for part in torch.split(torch.arange(len(vectors)), _PART):
        distances = torch.cdist(vectors[part], vectors)
        distances[torch.arange(len(part)), part] = torch.inf
        found.append(distances.amin(1))
    return torch.cat(found)
