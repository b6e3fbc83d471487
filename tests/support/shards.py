"""Shards of a log: in processes of their own, joined by gloo, or in threads, which start faster."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from models.compute.device import Processes
from models.data.interactions import Interactions
from service.training.process_group import process_group

T = TypeVar("T")
_PATIENCE = 60.0  # seconds that a thread waits for the others


def in_processes(count: int, work: Callable[..., T], *args: Any) -> list[T]:
    """Return the results of `work(shards, *args)` in `count` processes; all must be picklable."""
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(count, _member, folder, work, args) as group,
    ):
        _member(group, folder, work, args)
        paths = [Path(folder) / str(rank) for rank in range(count)]
        return [pickle.loads(path.read_bytes()) for path in paths]


def _member(group: Processes, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    result = work(group, *args)
    (Path(folder) / str(group.index)).write_bytes(pickle.dumps(result))
    group.sum(np.zeros(1, np.int64))  # all have written their files


def in_threads(count: int, work: Callable[[Processes], T]) -> list[T]:
    """Return the results of `work(shards)` in `count` threads; it draws no random tensor."""
    meeting = _Meeting(count)

    def run(index: int) -> T:
        try:
            return work(_ThreadShards(index, count, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, index) for index in range(count)]
        return [future.result() for future in futures]


class _Meeting:
    """A place where threads swap values."""

    def __init__(self, count: int) -> None:
        self.barrier = Barrier(count, timeout=_PATIENCE)
        self._values: list[Any] = [None] * count

    def swap(self, index: int, value: Any) -> list[Any]:
        """The values of all threads, in their order."""
        self._values[index] = value
        self.barrier.wait()
        found = list(self._values)
        self.barrier.wait()  # before anybody brings the next value
        return found


@dataclass(frozen=True, slots=True)
class _ThreadShards(Processes):
    meeting: _Meeting = field(default_factory=lambda: _Meeting(1), compare=False)

    def max(self, number: int) -> int:
        return max(self.gather_objects(number))

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        total: NDArray[Any] = np.sum(self.gather_objects(array), axis=0)
        return total

    def sum_on_first(self, matrix: Tensor) -> None:
        every = self.gather_objects(matrix.clone())
        if self.is_first:
            for other in every[1:]:
                matrix.add_(other)

    def gather(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate(self.gather_objects(array))

    def gather_objects(self, own: T) -> list[T]:
        return self.meeting.swap(self.index, own)

    def exchange(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return [sent[self.index] for sent in self.gather_objects(list(parts))]

    def broadcast(self, make: Callable[[], T], source: int = 0) -> T:
        every = self.gather_objects(make() if self.index == source else None)
        return cast(T, every[source])

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.gather_objects(tensor.clone())[0])


def shard_of(log: Interactions, shards: Processes) -> Interactions:
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
