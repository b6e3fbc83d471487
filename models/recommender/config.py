"""The shape of a recommender, by which its weights can be read again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class RecommenderConfig:
    """The shape of a recommender. It travels with the weights.

    Raises ValueError, naming the field, for a shape that no model can have.
    """

    n_items: int  # rows of the id embedding
    content_dim: int = 256  # dimension of the text embeddings
    dim: int = 128
    heads: int = 4
    blocks: int = 3  # of the history encoder; 0 leaves the sequence and the transitions out
    transitions_per_item: int = 512  # kept of each item; 0 leaves the transitions out
    window: int = 240  # recent events that the encoder reads, three quarters of them at least
    dropout: float = 0.3
    tied_values: bool = False  # W_V = W_K
    n_event_types: int = 1  # of events
    dislike_type: int = -1  # the type that says what was not liked; -1 = there is none
    dislike_heads: int = 0  # the last ones of the target attention: they see dislikes alone
    next_basket: bool = (
        False  # it is asked before a basket: what was taken at one time has no order
    )
    repeat_consumption: bool = False  # users come back to what they had

    def __post_init__(self) -> None:
        least = {"n_items": 0, "content_dim": 1, "dim": 1, "heads": 1, "blocks": 0, "window": 1}
        least |= {
            "transitions_per_item": 0,
            "n_event_types": 1,
            "dislike_type": -1,
            "dislike_heads": 0,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < lowest:
                raise ValueError(
                    f"{name} must be a whole number of at least {lowest}, not {value!r}"
                )
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim, {self.dim}, which {self.heads} does not")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout!r}")
        for name in ("tied_values", "next_basket", "repeat_consumption"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.dislike_type >= self.n_event_types or (
            self.dislike_type >= 0 and self.n_event_types < 2
        ):
            raise ValueError(f"dislike_type must be one of several types, not {self.dislike_type}")
        if self.dislike_heads and (self.dislike_type < 0 or self.dislike_heads >= self.heads):
            raise ValueError("dislike_heads must leave other heads, and have dislikes to see")

    def with_event_types(self, types: int, *, dislike: int, disliked: bool) -> RecommenderConfig:
        """This shape for a log of so many types of events.

        Args:
            types: how many there are.
            dislike: the one that says what was not liked, or -1.
            disliked: whether there is such an event: one head is then theirs, if another is left.
        """
        heads = 1 if disliked and self.heads > 1 else 0
        return replace(self, n_event_types=types, dislike_type=dislike, dislike_heads=heads)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
