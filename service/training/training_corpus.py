"""What is learned from: the log and the texts of its items, out of a store or a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.data.interactions import DISLIKE, Interactions
from models.data.vocabulary import Vocabulary
from models.encoder.event_types import UNKNOWN
from models.training.fit import TrainingProgress
from service.datasets import Dataset
from service.domain.errors import ModelRejected
from service.domain.records import Item
from service.snapshots.item_entries import to_entry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import Store

StageProgressCallback = Callable[[str, int, int, TrainingProgress | None], None]
"""Called as work goes on: the stage, how much is done, of how much, and the training's own."""

_TYPES = 64  # types of events that a model tells apart: the most frequent, and dislikes


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """What is learned from: the log over item rows, and each row's text."""

    log: Interactions
    item_ids: tuple[str, ...]  # row order
    content: NDArray[np.float32]  # [N, D]
    types: tuple[str, ...]  # names of the log's types of events, row order


def read(
    store: Store, embeddings: EmbeddingCache, progress: StageProgressCallback | None = None
) -> Corpus:
    """The whole log and the text of its items.

    Items of the catalogue that nobody has touched are left out: they have nothing to learn from,
    and serving them needs their text alone.
    """
    total = 0
    parts: list[Any] = []
    columns = None
    for columns in store.scan():
        parts.append(columns)
        total += len(columns)
        if progress is not None:
            progress("reading events", total, 0, None)
    if columns is None or not total:
        raise ModelRejected(
            "there are no events to learn from: import some with `heed import` or POST /v1/events"
        )
    item_ids = tuple(columns.item_ids)
    codes, types = _types(np.concatenate([part.types for part in parts]), columns.type_names)
    log = Interactions.from_columns(
        np.concatenate([part.users for part in parts]),
        np.concatenate([part.items for part in parts]),
        np.concatenate([part.timestamps for part in parts]),
        np.concatenate([part.weights for part in parts]),
        codes,
        n_users=len(columns.user_ids),
        n_items=len(item_ids),
        dislike_type=types.index(DISLIKE) if DISLIKE in types else -1,
    )
    if progress is not None:
        progress("reading items", 0, 0, None)
    content = _content(item_ids, store.scan_items(), embeddings, progress)
    return Corpus(log, item_ids, content, types)


def read_dataset(dataset: Dataset, embeddings: EmbeddingCache) -> Corpus:
    """The same of a data set, without a store. Raises what its readers raise."""
    users, items, names = Vocabulary(), Vocabulary(), Vocabulary()
    who, what, kinds, when, weights = [], [], [], [], []
    for event in dataset.events():
        who.append(users.add(event.user_id))
        what.append(items.add(event.item_id))
        kinds.append(names.add(event.type))
        when.append(event.timestamp or 0)
        weights.append(event.weight)
    codes, types = _types(np.array(kinds, dtype=np.int64), names.ids)
    log = Interactions.from_columns(
        np.array(who, dtype=np.int64),
        np.array(what, dtype=np.int64),
        np.array(when, dtype=np.int64),
        np.array(weights, dtype=np.float32),
        codes,
        n_users=len(users),
        n_items=len(items),
        dislike_type=types.index(DISLIKE) if DISLIKE in types else -1,
    )
    item_ids = tuple(items.id(row) for row in range(len(items)))
    return Corpus(log, item_ids, _content(item_ids, dataset.items(), embeddings), types)


def _content(
    item_ids: tuple[str, ...],
    items: Iterable[Item],
    embeddings: EmbeddingCache,
    progress: StageProgressCallback | None = None,
) -> NDArray[np.float32]:
    """The text embeddings [N, D] of these ids, kept; zero where none of the items has it."""
    catalogue = Catalogue.empty(embeddings.dimension, Vocabulary(item_ids))
    entries = (to_entry(item, embeddings.dimension) for item in items)
    touched = [entry for entry in entries if entry.item_id in catalogue.vocabulary]
    content = catalogue.updated(touched, [], encoding(embeddings, progress)).content
    embeddings.save()
    return content


def encoding(
    embeddings: EmbeddingCache, progress: StageProgressCallback | None = None
) -> Callable[[Sequence[str]], NDArray[np.float32]]:
    """How texts are encoded, telling how many are."""
    if progress is None:
        return embeddings.encode
    return partial(
        embeddings.encode,
        progress=lambda done, total: progress("encoding texts", done, total, None),
    )


def _types(
    codes: NDArray[np.integer[Any]], names: Sequence[str]
) -> tuple[NDArray[np.int16], tuple[str, ...]]:
    """The types of events [E] that occur, as rows of their names; -1 for the rarest of many."""
    there, place, counts = np.unique(codes, return_inverse=True, return_counts=True)
    counts[[names[code] == DISLIKE for code in there.tolist()]] = len(codes) + 1
    kept = np.sort(np.argsort(-counts, kind="stable")[:_TYPES])
    rows = np.full(len(there), UNKNOWN, dtype=np.int16)
    rows[kept] = np.arange(len(kept))
    return rows[place], tuple(names[code] for code in there[kept].tolist())
