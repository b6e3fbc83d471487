"""Shards of an event log: one of users in each process, and collective operations on statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

T = TypeVar("T")
N = TypeVar("N", bound=np.generic)

_BLOCK = 1 << 23  # elements that are reduced at once


@dataclass(frozen=True, slots=True)
class LogShards:
    """Processes that divide an event log by users, seen from one; one shard is the whole log.

    Each process of the torch.distributed group has the whole histories of its own users. Statistics
    of the log are put together from those of the shards, so that counts are exchanged, and events
    never. The methods are collective: all processes call the same ones in the same order.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """True for the process that computes what is computed once."""
        return self.index == 0

    def total(self, number: int) -> int:
        """Return the sum of a number."""
        return int(self.sum(np.array([number]))[0])

    def any(self, condition: bool) -> bool:
        """Report whether a condition holds in any shard."""
        return self.total(int(condition)) > 0

    def min(self, number: int) -> int:
        """Return the smallest of a number, int64."""
        return -self.max(-number)

    def max(self, number: int) -> int:
        """Return the largest of a number, int64."""
        if self.count == 1:
            return number
        largest = np.array([number])
        distributed.all_reduce(torch.from_numpy(largest), distributed.ReduceOp.MAX)
        return int(largest[0])

    def sum(self, array: NDArray[N]) -> NDArray[N]:
        """Return the sum of an array of numbers, of one shape in all shards."""
        if self.count == 1:
            return array
        total = np.array(array, order="C")
        distributed.all_reduce(torch.from_numpy(total))
        return total

    def sum_on_first(self, matrix: Tensor) -> None:
        """Replace a matrix by its sum, in place, in the first process; elsewhere it is spent."""
        if self.count == 1:
            return
        rows = max(1, _BLOCK // max(1, matrix.shape[1]))
        for block in torch.split(matrix, rows):
            distributed.reduce(block, 0)

    def gather(self, array: NDArray[N]) -> NDArray[N]:
        """Concatenate arrays [n, ...], of any n, in the order of the shards."""
        return array if self.count == 1 else np.concatenate(self.gather_objects(array))

    def gather_objects(self, own: T) -> list[T]:
        """Return an object of each shard, in their order."""
        if self.count == 1:
            return [own]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, own)
        return cast(list[T], found)

    def exchange(self, parts: Sequence[NDArray[N]]) -> list[NDArray[N]]:
        """Send the i-th of some arrays [n] of one dtype to shard i; returns what each has sent."""
        if self.count == 1:
            return list(parts)
        sent = [len(part) for part in parts]
        sizes = torch.tensor(sent, device="cpu")
        received = torch.empty_like(sizes)
        distributed.all_to_all_single(received, sizes)
        elements = torch.from_numpy(np.concatenate(parts))
        out = torch.empty(int(received.sum()), dtype=elements.dtype, device="cpu")
        distributed.all_to_all_single(out, elements, received.tolist(), sent)
        array: NDArray[N] = out.numpy()
        return np.split(array, np.cumsum(received.numpy())[:-1])

    def broadcast(self, make: Callable[[], T], source: int = 0) -> T:
        """Call `make` in one process and return its result in each."""
        if self.count == 1:
            return make()
        box = [make() if self.index == source else None]
        distributed.broadcast_object_list(box, source)
        return cast(T, box[0])

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor on the CPU by the one of the first process, and return it."""
        if self.count > 1:
            distributed.broadcast(tensor, 0)
        return tensor


WHOLE_LOG = LogShards()
