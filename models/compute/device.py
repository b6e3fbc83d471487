"""The device that computes, and the processes that share the work of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

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

_COALESCED = 1 << 16  # elements: smaller tensors are reduced as one, since a message has a cost


@dataclass(frozen=True, slots=True)
class DataParallelGroup:
    """An initialised torch.distributed process group, seen from one rank.

    All ranks run the same steps; averaged gradients keep their weights identical.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """True for the rank that reports, validates and saves."""
        return self.rank == 0

    def shard(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this rank's rows of a batch [n, ...]: every n-th, as similar lengths adjoin."""
        return windows[self.rank :: self.world_size]

    def all_reduce_mean(self, tensors: Sequence[Tensor], weight: float) -> float:
        """Replace tensors by their means over the ranks, weighted by each rank's `weight`.

        Returns the sum of the weights. If it is 0, the tensors become 0.
        """
        if self.world_size == 1:
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

    def all_reduce_sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.world_size == 1:
            return array
        total = array.copy()
        distributed.all_reduce(torch.from_numpy(total))
        return total

    def broadcast(self, make: Callable[[], T]) -> T:
        """Call `make` on rank zero and return its result on every rank.

        If it raises, the other ranks wait until rank zero has exited.
        """
        if self.world_size == 1:
            return make()
        box = [make() if self.is_rank_zero else None]
        distributed.broadcast_object_list(box)
        return cast(T, box[0])


SINGLE_PROCESS = DataParallelGroup()
