"""Shards of a log in processes of their own, joined by gloo."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from models.compute.data_parallel import DataParallelGroup
from models.data.interactions import Interactions
from models.data.log_shards import LogShards
from service.training.process_group import process_group


def in_shards(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(shards, *args)` returns in each of so many processes; all must be picklable."""
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(count, _member, folder, work, args) as group,
    ):
        _member(group, folder, work, args)
        paths = [Path(folder) / str(rank) for rank in range(count)]
        return [pickle.loads(path.read_bytes()) for path in paths]


def _member(
    group: DataParallelGroup, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    result = work(LogShards(group.rank, group.world_size), *args)
    (Path(folder) / str(group.rank)).write_bytes(pickle.dumps(result))
    group.all_reduce_sum(np.zeros(1, np.int64))  # all have written their files


def shard_of(log: Interactions, shards: LogShards) -> Interactions:
    """The histories of every `count`-th user of a log, from the `index`-th on."""
    own = log.users % shards.count == shards.index
    return Interactions.from_columns(
        log.users[own] // shards.count,
        log.items[own],
        log.timestamps[own],
        log.weights[own],
        log.types[own],
        n_users=len(range(shards.index, log.n_users, shards.count)),
        n_items=log.n_items,
        dislike_type=log.dislike_type,
        shards=shards,
    )
