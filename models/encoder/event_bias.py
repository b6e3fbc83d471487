"""Score biases of events by position, age and type, and the embeddings of types and weights.

The bias by position and age is taken from buckets, and never enters the values. A type is a row of
the model's type table; any other number is an unknown type, which adds nothing.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

POSITION_BUCKETS = 32
AGE_BUCKETS = 40
BUCKETS = POSITION_BUCKETS * AGE_BUCKETS  # of position and age together
FARTHEST = 2**62  # an age (microseconds) or distance (events) in the last bucket
_EXACT = 16  # distances below this have a bucket each
_FAR = 512  # the least distance in the last bucket


def position_bucket(distance: Tensor) -> Tensor:
    """Bucket distances [...] in events: exact below 16, then three per octave, at most 31.

    0 is the newest event; a negative distance counts as 0.
    """
    table = POSITION_BUCKET_OF.to(distance.device)
    return table[distance.clamp(0, len(table) - 1)]


def age_bucket(age: Tensor) -> Tensor:
    """Bucket ages [...] in microseconds: 0 for age 0, then 1.4 per octave of seconds, at most 39.

    A negative age (a clock that ran backwards) counts as 0. Returns int32.
    """
    edges = AGE_EDGES.to(age.device)
    return torch.bucketize(age.contiguous(), edges, right=True, out_int32=True)


def recency_bucket(distance: Tensor, age: Tensor) -> Tensor:
    """Bucket position and age together: int32 in [0, BUCKETS), position-major."""
    return age_bucket(age) + (position_bucket(distance) * AGE_BUCKETS).int()


def bucket_margins(ages: NDArray[np.int64]) -> tuple[int, int]:
    """How far all ages [n] may shift before any changes its bucket, in microseconds.

    Returns the largest decrease that keeps every bucket, and the smallest increase that changes
    one; `FARTHEST` if unbounded. An age is negative if its event is after the request.
    """
    edges = AGE_EDGES.numpy()
    bucket = np.searchsorted(edges, ages, side="right")
    begun, ends = ages[bucket > 0], ages[bucket < len(edges)]
    younger = begun - edges[bucket[bucket > 0] - 1]
    older = edges[bucket[bucket < len(edges)]] - ends
    return int(younger.min(initial=FARTHEST)), int(older.min(initial=FARTHEST))


def _age_edge(number: int) -> int:
    """Return the least age in microseconds of a bucket: ⌊1 + 1.4 log2(1 + seconds)⌋, or 0 at 0."""
    age = max(1, math.floor((2 ** ((number - 1) / 1.4) - 1) * 1e6) - 1)
    while math.floor(1 + 1.4 * math.log2(1 + age / 1e6)) < number:
        age += 1
    return age


def _position_bucket(distance: int) -> int:
    if distance < _EXACT:
        return distance
    return _EXACT + math.floor(3 * math.log2(distance / _EXACT))


AGE_EDGES = torch.tensor([_age_edge(number) for number in range(1, AGE_BUCKETS)])
POSITION_BUCKET_OF = torch.tensor([_position_bucket(distance) for distance in range(_FAR + 1)])


class RecencyBias(nn.Module):
    """A per-head bias b_h = P_h[position] + T_h[age] + J_h[position, age] on attention scores.

    P starts as a line that falls with the bucket, with a slope per head from flat to steep as in
    ALiBi (Press et al. 2022), so that heads differ in range from the start; T and J start at 0.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        fall = -torch.linspace(0, 1, POSITION_BUCKETS)
        self.position = nn.Parameter(torch.linspace(0, 4, heads)[:, None] * fall)  # [H, positions]
        self.age = nn.Parameter(torch.zeros(heads, AGE_BUCKETS))
        self.joint = nn.Parameter(torch.zeros(heads, BUCKETS))

    def table(self) -> Tensor:
        """The bias of every bucket of `recency_bucket`, [H, BUCKETS]."""
        return (self.position[:, :, None] + self.age[:, None, :]).flatten(1) + self.joint

    def forward(self, distance: Tensor, age: Tensor) -> Tensor:
        """The bias [H, ...] for distances in events and ages in microseconds [...]."""
        return gather_bias(recency_bucket(distance, age), self.table())


class _GatherBias(torch.autograd.Function):
    """table[:, bucket] for indices [...] and a table [H, buckets] -> [H, ...].

    The gradient of a small table is a weighted bincount of its indices, several times faster than
    the scatter-add of an embedding's backward.
    """

    @staticmethod
    def forward(ctx: Any, bucket: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(bucket)
        ctx.size = table.shape[1]
        return table.index_select(1, bucket.reshape(-1)).view(len(table), *bucket.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (bucket,) = ctx.saved_tensors
        return None, bucket_sums(bucket.reshape(-1), gradient.flatten(1), ctx.size)


def gather_bias(bucket: Tensor, table: Tensor) -> Tensor:
    """table[:, bucket] with a fast gradient: bucket [...], table [H, buckets] -> [H, ...]."""
    if not (table.requires_grad and torch.is_grad_enabled()):
        return table.index_select(1, bucket.reshape(-1)).view(len(table), *bucket.shape)
    return cast(Tensor, _GatherBias.apply(bucket, table))  # type: ignore[no-untyped-call]


def bucket_sums(bucket: Tensor, weights: Tensor, size: int) -> Tensor:
    """Sum weights [H, n] by bucket [n], giving [H, size]."""
    heads = [torch.bincount(bucket, weights=head, minlength=size) for head in weights]
    return torch.stack(heads).to(weights.dtype)


UNKNOWN = -1  # a type outside the model's table
MASKED = -2  # a dislike for a model without a dislike type, which would read it as a like


def is_liked(types: Tensor, dislike: int) -> Tensor:
    """True where types int64 [...] are not `dislike`; everywhere if that is -1, no type."""
    return (types != dislike) | (dislike < 0)


class EventEmbedding(nn.Module):
    """Adds an event's type and weight to its item vector: x + E[type] + log(w)·e, initially 0."""

    def __init__(self, types: int, dim: int) -> None:
        super().__init__()
        self.type_embedding = nn.Parameter(torch.zeros(types, dim)) if types > 1 else None
        self.log_weight_embedding = nn.Parameter(torch.zeros(dim))

    def forward(self, vectors: Tensor, types: Tensor, log_weights: Tensor) -> Tensor:
        """Embed item vectors [..., dim], types int64 [...] and log weights [...]."""
        if self.type_embedding is not None:
            table = pad(self.type_embedding, (0, 0, 0, 1))  # a row of zeros for unknown types
            vectors = vectors + embedding(_rows(types, len(self.type_embedding)), table)
        if bool(log_weights.any()):
            vectors = vectors + log_weights[..., None] * self.log_weight_embedding
        return vectors


class EventTypeBias(nn.Module):
    """A score bias per head and type, initially 0; -inf masks a type from a head.

    The last heads see only dislikes, and the others none: softmax weights cannot be negative,
    so a dislike needs values of its own to count against a target.
    """

    hidden: Tensor

    def __init__(self, types: int, heads: int, dislike: int, dislike_heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, types))
        hidden = torch.zeros(heads, types + 1, dtype=torch.bool)  # the last column: unknown
        if dislike >= 0:
            dislike_only = torch.arange(heads) >= heads - dislike_heads
            hidden[dislike_only] = True
            hidden[:, dislike] = ~dislike_only
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self, types: Tensor) -> Tensor:
        """The bias [H, ...] of types int64 [...]."""
        table = pad(self.bias, (0, 1)).masked_fill(self.hidden, -math.inf)
        return gather_bias(_rows(types, self.bias.shape[1]), table)


def _rows(types: Tensor, size: int) -> Tensor:
    return torch.where((types >= 0) & (types < size), types, size)
