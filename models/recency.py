"""How far back, in position and in time: the bias on the score that never enters the values."""

from __future__ import annotations

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
    seconds = age.clamp(min=0).double() / 1e6
    bucket = torch.floor(1 + 1.4 * torch.log2(1 + seconds)).clamp(max=AGE_BUCKETS - 1).long()
    return torch.where(age <= 0, torch.zeros_like(bucket), bucket)


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

    def forward(self, distance: Tensor, age: Tensor) -> Tensor:
        """The bias [..., H, *last two] for distances in events and ages in microseconds.

        Args:
            distance: integers, broadcastable against `age`, [..., Q, K].
            age: integers [..., Q, K].

        Returns:
            Tensor: [..., H, Q, K].
        """
        embed = nn.functional.embedding  # its backward is a scatter-add that CPUs do well
        bias = embed(position_bucket(distance), self.position)
        bias = bias + embed(age_bucket(age), self.age)  # (..., Q, K, H)
        return bias.movedim(-1, -3)
