"""The configuration of a recommender, which travels with its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

_MINIMUM = {
    "n_items": 0, "content_dim": 1, "dim": 1, "heads": 1, "blocks": 0, "transitions_per_item": 0,
    "attention_heads": 1, "window": 1, "n_event_types": 1, "dislike_type": -1, "dislike_heads": 0,
    "similar_items": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecommenderConfig:
    """Dimensions and options of a recommender.

    Raises ValueError, naming the field, for an impossible configuration.
    """

    n_items: int  # rows of the id embedding
    content_dim: int = 256  # dimension of the text embeddings
    dim: int = 128
    heads: int = 4  # of the encoder; those of the target attention are of the same size
    attention_heads: int = 4  # of the target attention
    blocks: int = 3  # of the history encoder; 0: neither states nor a transition part
    transitions_per_item: int = 512  # largest counts kept of each item; 0 disables the part
    similar_items: int = 0  # largest similarity weights kept of each item; 0: no such part
    window: int = 240  # recent events that the encoder reads, three quarters of them at least
    dropout: float = 0.3
    tied_values: bool = False  # W_V = W_K
    n_event_types: int = 1
    dislike_type: int = -1  # the event type of dislikes; -1 = none
    dislike_heads: int = 0  # the last heads of the target attention, which see dislikes alone
    small_log: bool = False  # transitions are of more of the newest events
    next_basket: bool = False  # predicts the next basket; events of one time have no order
    repeat_consumption: bool = False  # users take items again, so seen items stay candidates

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise ValueError(
                    f"{name} must be a whole number of at least {minimum}, not {value!r}"
                )
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim, {self.dim}, which {self.heads} does not")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout!r}")
        for name in ("tied_values", "small_log", "next_basket", "repeat_consumption"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        types, dislike = self.n_event_types, self.dislike_type
        if dislike >= types or (dislike >= 0 and types < 2):
            raise ValueError(f"dislike_type must be one of several types, not {dislike}")
        if self.dislike_heads and (dislike < 0 or self.dislike_heads >= self.attention_heads):
            raise ValueError("dislike_heads must leave other heads, and needs a dislike_type")

    def with_event_types(
        self, types: int, *, dislike_type: int, has_dislikes: bool
    ) -> RecommenderConfig:
        """Return this configuration for a log with these event types.

        Args:
            types: number of event types.
            dislike_type: the event type of dislikes, or -1.
            has_dislikes: whether the log has any; one head is then theirs if another is left.
        """
        heads = 1 if has_dislikes and self.attention_heads > 1 else 0
        return replace(self, n_event_types=types, dislike_type=dislike_type, dislike_heads=heads)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)
