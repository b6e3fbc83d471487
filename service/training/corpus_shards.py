"""A training corpus that several processes read, each a shard: common names, texts, and one store.

All functions are collective over the shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.data.log_shards import LogShards
from service.domain.errors import Invalid
from service.stores.base import Store
from service.stores.values import LogColumns

# Events may arrive while the processes read one after another; a copy that was forgotten, or is
# old, lacks more than that.
_MAX_DIFFERENCE = 0.01

_NO_CODES = np.zeros(0, np.int32)
NO_COLUMNS = LogColumns(
    [], [], [], _NO_CODES, _NO_CODES, _NO_CODES, np.zeros(0, np.int64), np.zeros(0, np.float32)
)


def check_same_store(store: Store, shards: LogShards) -> None:
    """Check that the store of each process has about as many events as those of the others.

    Raises `Invalid` otherwise, in all processes: users would be missing.
    """
    counts = shards.gather_objects(asyncio.run(store.counts())["events"])
    if max(counts) - min(counts) > _MAX_DIFFERENCE * max(counts):
        found = ", ".join(f"{count:,}" for count in counts)
        raise Invalid(
            "",
            f"the stores of the processes have {found} events: all must read the same store, or "
            "equal copies of it",
        )


def with_common_names(columns: LogColumns, shards: LogShards) -> LogColumns:
    """Encode items and types of a shard by the names of all shards, in ascending order."""
    if shards.count == 1:
        return columns
    item_ids, items = _encode(columns.item_ids, columns.items, shards)
    type_names, types = _encode(columns.type_names, columns.types, shards)
    return replace(columns, item_ids=item_ids, type_names=type_names, items=items, types=types)


def _encode(
    own: Sequence[str], codes: NDArray[np.int32], shards: LogShards
) -> tuple[list[str], NDArray[np.int32]]:
    """Return the names of all shards, and the codes of this one's names as rows of them."""
    known: set[str] = set()
    for source in range(shards.count):
        known.update(shards.broadcast(lambda: [each for each in own if each not in known], source))
    names = sorted(known)
    rows = {name: row for row, name in enumerate(names)}
    lookup = np.array([rows[name] for name in own], dtype=np.int32)
    return names, lookup[codes]


def first_content(
    make: Callable[[], NDArray[np.float32]], shape: tuple[int, int], shards: LogShards
) -> NDArray[np.float32]:
    """Return the embeddings [N, D] that the first process makes: all must train on the same."""
    if shards.count == 1:
        return make()
    content: NDArray[Any] = make() if shards.is_first else np.empty(shape, np.float32)
    content = np.require(content, np.float32, ["C", "W"])
    shards.broadcast_tensor(torch.from_numpy(content))
    return content
