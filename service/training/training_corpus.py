"""Training corpus: the log and the texts of its items, read from a store or a data set.

Several processes may read one corpus, each a shard, with common names and texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import DISLIKE, NEGATIVE, Interactions, at_import, lacks_order
from models.data.vocabulary import Vocabulary
from models.encoder.event_bias import UNKNOWN
from models.evaluation.splits import Holdout
from models.training.fit import TrainingProgress
from models.training.log_profile import imported_first, without_order
from service.datasets.base import Dataset
from service.domain.errors import Invalid, ModelRejected
from service.domain.records import Item
from service.snapshots.catalogue_updates import to_entry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import Store
from service.stores.values import LogColumns, Shard

# Events may arrive while the processes read one after another; a copy that was forgotten, or is
# old, lacks more than that.
_MAX_DIFFERENCE = 0.01

_NO_CODES = np.zeros(0, np.int32)
NO_COLUMNS = LogColumns(
    user_ids=[],
    item_ids=[],
    type_names=[],
    users=_NO_CODES,
    items=_NO_CODES,
    types=_NO_CODES,
    timestamps=np.zeros(0, np.int64),
    weights=np.zeros(0, np.float32),
)


def check_same_store(store: Store, shards: Processes) -> None:
    """Raise Invalid, in all processes, unless their stores have about equally many events.

    Users would be missing.
    """
    counts = shards.gather_objects(asyncio.run(store.counts())["events"])
    if max(counts) - min(counts) > _MAX_DIFFERENCE * max(counts):
        found = ", ".join(f"{count:,}" for count in counts)
        raise Invalid(
            "",
            f"the stores of the processes have {found} events: all must read the same store, or "
            "equal copies of it",
        )


def with_common_names(columns: LogColumns, shards: Processes) -> LogColumns:
    """Encode items and types of a shard by the names of all shards, in ascending order."""
    if shards.count == 1:
        return columns
    item_ids, items = _encode(columns.item_ids, columns.items, shards)
    type_names, types = _encode(columns.type_names, columns.types, shards)
    return replace(columns, item_ids=item_ids, type_names=type_names, items=items, types=types)


def _encode(
    own: Sequence[str], codes: NDArray[np.int32], shards: Processes
) -> tuple[list[str], NDArray[np.int32]]:
    """The names of all shards, and the codes of this one's names as rows of them."""
    known: set[str] = set()
    for source in range(shards.count):
        known.update(shards.broadcast(lambda: [each for each in own if each not in known], source))
    names = sorted(known)
    rows = {name: row for row, name in enumerate(names)}
    lookup = np.array([rows[name] for name in own], dtype=np.int32)
    return names, lookup[codes]


StageProgressCallback = Callable[[str, int, int, TrainingProgress | None], None]
"""Called with a stage, its steps done and in total (0 = unknown), and a training's progress."""


_MAX_EVENT_TYPES = 64  # that a model distinguishes: the most frequent ones, and dislikes


@dataclass(frozen=True, slots=True, eq=False)
class TrainingCorpus:
    """A log over item rows, and the text embedding of each row.

    The log may be a shard of one that several processes read; items and types are those of all.
    """

    log: Interactions
    item_ids: tuple[str, ...]  # row order
    content: NDArray[np.float32]  # [N, D]
    types: tuple[str, ...]  # names of the log's event types, row order
    shard_events: tuple[int, ...]  # number of events of each shard
    user_keys: NDArray[np.uint64]  # [U] digests of the ids of the log's users
    has_times: bool = True  # if False, the log's order is random, and its times are equal
    without_time: int = 0  # events of all shards that have the time of their import

    @property
    def events(self) -> int:
        return sum(self.shard_events)

    def case_keys(self, cases: Holdout) -> NDArray[np.uint64]:
        """A digest of each case [M]: its user, its target and, if it has one, its time."""
        items = _digests(self.item_ids)[cases.targets]
        pairs = _mix(self.user_keys[cases.users] + _mix(items))
        return _mix(pairs + cases.timestamps.astype(np.uint64)) if self.has_times else pairs


def read_store(
    store: Store,
    embeddings: EmbeddingCache,
    progress: StageProgressCallback = lambda *_: None,
    shards: Processes = SINGLE_PROCESS,
) -> TrainingCorpus:
    """Read the log of a store and the texts of its items.

    Items of the catalogue without an event are left out: nothing can be learned about them, and
    serving them needs only their text. The `shards` call this together, each with the
    store or an equal copy of it; each reads the events of its own users, and rank zero the texts.

    Raises ModelRejected for a store without events, Invalid if the processes read different stores.
    """
    if shards.count > 1:
        check_same_store(store, shards)
    parts = [NO_COLUMNS]
    total = 0
    shard = Shard(shards.index, shards.count) if shards.count > 1 else None
    for part in store.scan(shard=shard):
        parts.append(part)
        total += len(part)
        progress("reading events", total, 0, None)
    if not shards.any(total > 0):
        raise ModelRejected(
            "there are no events to learn from: import some with `heed import` or POST /v1/events"
        )
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("users", "items", "types", "timestamps", "weights")
    }
    progress("reading items", 0, 0, None)
    whole = with_common_names(replace(parts[-1], **columns), shards)
    return _corpus(whole, store.scan_items(), embeddings, progress, shards)


def read_dataset(dataset: Dataset, embeddings: EmbeddingCache) -> TrainingCorpus:
    users, items, types = Vocabulary(), Vocabulary(), Vocabulary()
    rows = [
        (
            users.add(event.user_id),
            items.add(event.item_id),
            types.add(event.type),
            event.timestamp or 0,
            event.weight,
        )
        for event in dataset.events()
    ]
    table = np.array(rows, "i4, i4, i4, i8, f4")
    columns = (table[name] for name in table.dtype.names or ())
    log = LogColumns(list(users.ids), list(items.ids), list(types.ids), *columns)
    return _corpus(log, dataset.items(), embeddings)


def _corpus(
    columns: LogColumns,
    items: Iterable[Item],
    embeddings: EmbeddingCache,
    progress: StageProgressCallback = lambda *_: None,
    shards: Processes = SINGLE_PROCESS,
) -> TrainingCorpus:
    codes, types = _encode_types(columns.types, columns.type_names, shards)
    log = Interactions.from_columns(
        columns.users,
        columns.items,
        columns.timestamps,
        columns.weights,
        codes,
        n_users=len(columns.user_ids),
        n_items=len(columns.item_ids),
        dislike_type=types.index(DISLIKE) if DISLIKE in types else -1,
        shards=shards,
    )
    item_ids = tuple(columns.item_ids)
    user_keys = _digests(columns.user_ids)
    imported = at_import(log.timestamps, shards)
    count = shards.total(int(np.count_nonzero(imported)))
    has_times = not lacks_order(imported, shards)
    if count:
        keys = _mix(user_keys[log.users] + _mix(_digests(item_ids)[log.items]))
        log = imported_first(log, imported, keys) if has_times else without_order(log, keys)
    if shards.is_first:
        content = _content(item_ids, items, embeddings, progress)
    else:  # all must train on the same
        content = np.empty((len(item_ids), embeddings.encoder.dimension), np.float32)
    if shards.count > 1:
        content = np.require(content, np.float32, ["C", "W"])
        shards.broadcast_tensor(torch.from_numpy(content))
    counts = tuple(shards.gather_objects(len(log)))
    return TrainingCorpus(
        log=log,
        item_ids=item_ids,
        content=content,
        types=types,
        shard_events=counts,
        user_keys=user_keys,
        has_times=has_times,
        without_time=count,
    )


def _digests(ids: Sequence[str]) -> NDArray[np.uint64]:
    """A number of each id, the same in every training."""
    made = b"".join(blake2b(name.encode(), digest_size=8).digest() for name in ids)
    return np.frombuffer(made, np.uint64)


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread numbers over all 64 bits (the finaliser of SplitMix64)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _content(
    item_ids: tuple[str, ...],
    items: Iterable[Item],
    embeddings: EmbeddingCache,
    progress: StageProgressCallback,
) -> NDArray[np.float32]:
    """The text embeddings [N, D] of these ids, which are saved; 0 where an item is unknown."""
    catalogue = Catalogue.empty(embeddings.encoder.dimension, Vocabulary(item_ids))
    entries = (to_entry(item, embeddings.encoder.dimension) for item in items)
    touched = [entry for entry in entries if entry.item_id in catalogue.vocabulary]
    content = catalogue.updated(touched, [], encode_with_progress(embeddings, progress)).content
    embeddings.save()
    return content


def encode_with_progress(
    embeddings: EmbeddingCache, progress: StageProgressCallback = lambda *_: None
) -> Callable[[Sequence[str]], NDArray[np.float32]]:
    return partial(
        embeddings.encode,
        progress=lambda done, total: progress("encoding texts", done, total, None),
    )


def _encode_types(
    codes: NDArray[np.integer[Any]], names: Sequence[str], shards: Processes
) -> tuple[NDArray[np.int16], tuple[str, ...]]:
    """Encode event types [E] as rows of the returned names; -1 for the rarest beyond the limit.

    Negative types are one, the dislike.
    """
    read = [DISLIKE if name in NEGATIVE else name for name in names]
    names = list(dict.fromkeys(read))
    codes = np.array([names.index(name) for name in read], np.int32)[codes]
    every = shards.sum(np.bincount(codes, minlength=len(names)))
    present = np.flatnonzero(every)
    counts = every[present]
    counts[[names[code] == DISLIKE for code in present.tolist()]] = every.sum() + 1
    kept = np.sort(np.argsort(-counts, kind="stable")[:_MAX_EVENT_TYPES])
    rows = np.full(len(names), UNKNOWN, dtype=np.int16)
    rows[present[kept]] = np.arange(len(kept))
    return rows[codes], tuple(names[code] for code in present[kept].tolist())
