"""How far back, in position and in time: the bias on the score that never enters the values."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

POSITION_BUCKETS = 32
AGE_BUCKETS = 40
_EXACT = 16  # distances below this have a bucket each


def position_bucket(distance: Tensor) -> Tensor:
    """The bucket of a distance in events: itself below 16, then three an octave, at most 31.

    Args:
        distance: integers of any shape, 0 = the newest event; negative counts as 0.
    """
    distance = distance.clamp(min=0)
    octaves = torch.log2(distance.clamp(min=_EXACT).float() / _EXACT)
    far = (_EXACT + torch.floor(3 * octaves)).clamp(max=POSITION_BUCKETS - 1).long()
    return torch.where(distance < _EXACT, distance, far)


def age_bucket(age: Tensor) -> Tensor:
    """The bucket of an age in microseconds: 0 for none, then 1.4 an octave of seconds, at most 39.

    Args:
        age: integers of any shape; negative (a clock that ran backwards) counts as 0.
    """
    return torch.bucketize(age.contiguous(), _AGE_EDGES, right=True)


def _age_edges() -> Tensor:
    """The least age in microseconds of each bucket but the first: exact, and faster than logs."""

    def bucket(age: int) -> int:
        return math.floor(1 + 1.4 * math.log2(1 + age / 1e6))

    edges = [1]
    for number in range(2, AGE_BUCKETS):
        age = math.floor((2 ** ((number - 1) / 1.4) - 1) * 1e6) - 1
        while bucket(age) < number:
            age += 1
        edges.append(age)
    return torch.tensor(edges)


_AGE_EDGES = _age_edges()


class RecencyBias(nn.Module):
    """A per-head bias b_h = P_h[position bucket] + T_h[age bucket] on attention scores.

    P starts as a line falling with the bucket, at a slope of its own for each head (from flat to
    steep, as ALiBi does), so that heads differ in reach before anything is learned; T starts at 0.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        fall = -torch.linspace(0, 1, POSITION_BUCKETS)[:, None]
        self.position = nn.Parameter(fall * torch.linspace(0, 4, heads))  # [buckets, H]
        self.age = nn.Parameter(torch.zeros(AGE_BUCKETS, heads))  # [buckets, H]

    def forward(self, distance: Tensor, age: Tensor, visible: Tensor | None = None) -> Tensor:
        """The bias [..., H, *last two] for distances in events and ages in microseconds.

        Args:
            distance: integers, broadcastable against `age`, [..., Q, K].
            age: integers [..., Q, K].
            visible: bool, of the shape of `distance`; where False the bias is -inf.

        Returns:
            Tensor: [..., H, Q, K].
        """
        near = _looked_up(position_bucket(distance), self.position)
        if visible is not None:  # masked while it is small, before it meets the batch
            near = near.masked_fill(~visible, -torch.inf)
        old = _looked_up(age_bucket(age), self.age)  # (H, ..., Q, K)
        return near.movedim(0, -3) + old.movedim(0, -3)


class _Lookup(torch.autograd.Function):
    """table[bucket] by head: indices [...] and a table [buckets, H] -> [H, ...].

    The gradient of a small table is a weighted count of its indices, which is several times
    faster than the scatter-add of an embedding's backward.
    """

    @staticmethod
    def forward(ctx: Any, bucket: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(bucket)
        ctx.size = len(table)
        columns = table.T.contiguous()  # (H, buckets)
        return columns.index_select(1, bucket.reshape(-1)).view(len(columns), *bucket.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (bucket,) = ctx.saved_tensors
        flat = bucket.reshape(-1)
        counts = [
            torch.bincount(flat, weights=head.reshape(-1), minlength=ctx.size) for head in gradient
        ]
        return None, torch.stack(counts, dim=1).to(gradient.dtype)


def _looked_up(bucket: Tensor, table: Tensor) -> Tensor:
    return cast(Tensor, _Lookup.apply(bucket, table))  # type: ignore[no-untyped-call]
