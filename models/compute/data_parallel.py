"""The processes that train one model together: each takes a share of every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

T = TypeVar("T")
N = TypeVar("N", bound=np.number[Any])

_SMALL = 1 << 16  # entries: smaller tensors travel as one, whose cost is that of a message


@dataclass(frozen=True, slots=True)
class DataParallelGroup:
    """A process group of torch's that has been set up, as one of its members sees it.

    All members do the same steps; what they exchange makes their weights the same.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the member that says, validates and saves."""
        return self.rank == 0

    def shard(self, spans: NDArray[np.int64]) -> NDArray[np.int64]:
        """This member's rows of a batch [n, ...]: like lengths stand together, so every n-th."""
        return spans[self.rank :: self.world_size]

    def all_reduce_mean(self, tensors: Sequence[Tensor], worth: float) -> float:
        """Replace each tensor by its mean over the members, each of its own worth.

        Returns:
            float: the sum of the worths. Where that is 0 the tensors become 0.
        """
        if self.world_size == 1:
            return worth
        total = torch.tensor([worth], dtype=torch.float64)
        distributed.all_reduce(total)
        everything = float(total)
        share = worth / everything if everything else 0.0
        small = [tensor for tensor in tensors if tensor.numel() < _SMALL]
        for tensor in tensors:
            tensor.mul_(share)
            if tensor.numel() >= _SMALL:
                distributed.all_reduce(tensor)
        if small:
            flat = torch.cat([tensor.reshape(-1) for tensor in small])
            distributed.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in small])
            for tensor, part in zip(small, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        return everything

    def all_reduce_sum(self, array: NDArray[N]) -> NDArray[N]:
        """The sum of what the members have, the same for all."""
        if self.world_size == 1:
            return array
        total = torch.from_numpy(array).cpu().clone()
        distributed.all_reduce(total)
        summed: NDArray[N] = total.numpy()
        return summed

    def broadcast(self, make: Callable[[], T]) -> T:
        """What the leader makes, for all; where it raises, the others wait until it is gone."""
        if self.world_size == 1:
            return make()
        box = [make() if self.is_rank_zero else None]
        distributed.broadcast_object_list(box)
        return cast(T, box[0])


SINGLE_PROCESS = DataParallelGroup()
