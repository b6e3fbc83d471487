"""What the type and the weight of an event say: what is read of it, and which heads may see it.

A type is a row of the model's own types. Any other number is a type that the model does not know,
of which it reads nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from models.encoder.recency_bias import gather_bias

UNKNOWN = -1  # a type that the model does not know
MASKED = -2  # a dislike, where the model knows none: it would be taken for a like


def is_liked(types: Tensor, dislike: int) -> Tensor:
    """Which of types int64 [...] are not the one that says what was not liked; -1 = none does."""
    return (types != dislike) | (dislike < 0)


class EventEmbedding(nn.Module):
    """What is read of an event beside its item: x + kind[type] + log(w)·loudness, from 0 on."""

    def __init__(self, types: int, dim: int) -> None:
        super().__init__()
        # Of one type the same would be said of every event.
        self.type_embedding = nn.Parameter(torch.zeros(types, dim)) if types > 1 else None
        self.log_weight_embedding = nn.Parameter(torch.zeros(dim))

    def forward(self, vectors: Tensor, types: Tensor, log_weights: Tensor) -> Tensor:
        """What is read of events.

        Args:
            vectors: of their items, [..., dim].
            types: int64 [...].
            log_weights: [...].
        """
        if self.type_embedding is not None:
            table = torch.cat(
                [
                    self.type_embedding,
                    self.type_embedding.new_zeros(1, self.type_embedding.shape[1]),
                ]
            )
            vectors = vectors + embedding(_rows(types, len(self.type_embedding)), table)
        if bool(log_weights.any()):
            vectors = vectors + log_weights[..., None] * self.log_weight_embedding
        return vectors


class EventTypeBias(nn.Module):
    """A bias on the score by head and type, from 0 on; -inf where the head may not see the type.

    The last heads see dislikes alone, and the others never do: softmax weights cannot be negative,
    so what was not liked needs values of its own to count against a target.
    """

    hidden: Tensor

    def __init__(self, types: int, heads: int, dislike: int, dislike_heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, types))
        hidden = torch.zeros(heads, types + 1, dtype=torch.bool)  # the last: not known
        if dislike >= 0:
            against = torch.arange(heads) >= heads - dislike_heads
            hidden[against] = True
            hidden[:, dislike] = ~against
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self, types: Tensor) -> Tensor:
        """The bias [H, ...] of types int64 [...]."""
        heads, size = self.bias.shape
        table = torch.cat([self.bias, self.bias.new_zeros(heads, 1)], 1)
        return gather_bias(_rows(types, size), table.masked_fill(self.hidden, -math.inf))


def _rows(types: Tensor, size: int) -> Tensor:
    """Rows of a table of `size` types whose last is that of types that are not known."""
    return torch.where((types >= 0) & (types < size), types, size)
