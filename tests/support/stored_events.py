"""Stored events of made-up users over a small catalogue, and a provider of their memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import Vocabulary
from models.history.user_history import UserHistory
from service.domain.settings import Settings
from service.histories.event_columns import EventColumns
from service.histories.memory_provider import MemoryProvider
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import Store
from tests.support.small import encode, random_past

ITEMS = 15


class SmallEncoder:
    """The encoder of the small snapshots' texts."""

    name, quick = "small", True
    dimension = len(encode(["a"])[0])

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors [n, D]."""
        return encode(texts)


def stored_events(user_id: str, length: int, *, version: int | None = None) -> EventColumns:
    """The first events of a user's history, at a version that is their number by default."""
    whole = random_past(sum(user_id.encode()), 30, ITEMS)
    return EventColumns(
        user_id,
        length + 1 if version is None else version,
        1,
        1,
        whole.rows[:length],
        whole.timestamps[:length],
        np.arange(1, length + 1, dtype=np.uint32),
        np.zeros(length, np.int32),
        ("view",),
        whole.weights[:length],
        {},
        None,
    )


def user_history(snapshot: Snapshot, events: EventColumns) -> UserHistory:
    """The same events as a model reads them, without the provider."""
    types = np.full(len(events), snapshot.type_rows(["view"])[0], np.int32)
    return UserHistory(events.rows, events.timestamps, events.filled_weights(), types=types)


def memory_provider(
    max_bytes: int, store: Store | None = None, vocabulary: Vocabulary | None = None
) -> MemoryProvider:
    """A provider with a budget; without a store where only `memory` is called."""
    return MemoryProvider(
        cast(Store, store),
        Vocabulary() if vocabulary is None else vocabulary,
        EmbeddingCache(SmallEncoder()),
        Settings(history_cache_bytes=max_bytes, max_exact_rows=1_000),
    )
