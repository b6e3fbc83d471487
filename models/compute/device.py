"""The device that computes, and the processes that share the work of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed


def training_device(rank: int = 0) -> torch.device:
    """Return a GPU if there is one, spreading ranks over the GPUs, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device multiplies it faster than float32, else float32.

    Sums, softmax and weights stay in float32 either way.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # Without such instructions bfloat16 is emulated, at a fraction of float32's speed.
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return a context that takes matrix products in `dtype`; no-op for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


T = TypeVar("T")
N = TypeVar("N", bound=np.generic)

_BLOCK = 1 << 23  # elements that are reduced at once
_COALESCED = 1 << 16  # elements: smaller tensors are reduced as one, since a message has a cost


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of a torch.distributed group that share work, seen from one.

    They share a training: all take the same steps, and averaged gradients keep their weights
    identical. Or they divide an event log by users, as its shards: each has the whole histories of
    its own users, and statistics of the log are put together from those of the shards, so that
    counts are exchanged, and events never. One shard is the whole log. The methods are collective:
    all processes call the same ones in the same order.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """True for the process that does what is done once: it reports, validates and saves."""
        return self.index == 0

    def total(self, number: int) -> int:
        return int(self.sum(np.array([number]))[0])

    def any(self, condition: bool) -> bool:
        return self.total(int(condition)) > 0

    def min(self, number: int) -> int:
        return -self.max(-number)

    def max(self, number: int) -> int:
        if self.count == 1:
            return number
        largest = np.array([number])
        distributed.all_reduce(torch.from_numpy(largest), distributed.ReduceOp.MAX)
        return int(largest[0])

    def sum(self, array: NDArray[N]) -> NDArray[N]:
        """The sum of an array of numbers, of one shape in all shards."""
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
        """Call `make` in one process and return its result in each.

        If it raises, the other processes wait until that one has exited.
        """
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

    def shard(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this rank's rows of a batch [n, ...]: every n-th, as similar lengths adjoin."""
        return windows[self.index :: self.count]

    def all_reduce_mean(self, tensors: Sequence[Tensor], weight: float) -> float:
        """Replace tensors by their means over the ranks, weighted by each rank's `weight`.

        Returns the sum of the weights. If it is 0, the tensors become 0.
        """
        if self.count == 1:
            return weight
        reduced = torch.tensor([weight], dtype=torch.float64)
        distributed.all_reduce(reduced)
        total = float(reduced)
        share = weight / total if total else 0.0
        small = [tensor for tensor in tensors if tensor.numel() < _COALESCED]
        for tensor in tensors:
            tensor.mul_(share)
            if tensor.numel() >= _COALESCED:
                distributed.all_reduce(tensor)
        if small:
            flat = torch.cat([tensor.reshape(-1) for tensor in small])
            distributed.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in small])
            for tensor, part in zip(small, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        return total


SINGLE_PROCESS = Processes()
