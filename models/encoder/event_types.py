"""Event types and weights: input embeddings for the encoder, score biases for the attention.

A type is a row of the model's type table. Any other number is an unknown type, which adds nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from models.encoder.recency_bias import gather_bias

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
        """Embed events: item vectors [..., dim], types int64 [...] and log weights [...]."""
        if self.type_embedding is not None:
            table = pad(self.type_embedding, (0, 0, 0, 1))  # a row of zeros for unknown types
            vectors = vectors + embedding(_rows(types, len(self.type_embedding)), table)
        if bool(log_weights.any()):
            vectors = vectors + log_weights[..., None] * self.log_weight_embedding
        return vectors


class EventTypeBias(nn.Module):
    """A score bias per head and type, initially 0; -inf masks a type from a head.

    The last heads see dislikes alone, and the others never do: softmax weights cannot be negative,
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
        """Return the bias [H, ...] of types int64 [...]."""
        table = pad(self.bias, (0, 1)).masked_fill(self.hidden, -math.inf)
        return gather_bias(_rows(types, self.bias.shape[1]), table)


def _rows(types: Tensor, size: int) -> Tensor:
    """Map types to rows of a table of `size` types, unknown ones to its last row."""
    return torch.where((types >= 0) & (types < size), types, size)
