"""Statistics of the training log that a model keeps beside its trained parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.recommender.config import RecommenderConfig
from models.recommender.item_similarity import SIMILARITY_DEPTH, ItemSimilarity
from models.recommender.recent_popularity import HALF_LIVES
from models.recommender.transition_counts import (
    BASKET_WINDOW,
    SEQUENCE_WINDOW,
    SMALL_LOG_WINDOW,
    CooccurrenceWindow,
    TransitionCounts,
)

MAX_REQUEST_GAP = 2**60  # microseconds: clamps no request


class LogStatistics(nn.Module):
    """Buffers that are counted from the log instead of trained; empty until `load`."""

    transition_items: Tensor
    transition_sums: Tensor
    max_request_gap: Tensor  # microseconds, see `clamp_request_time`
    recent_popularity: Tensor | None  # [half-lives, N + 1]; None unless for the next basket
    similar_items: Tensor | None  # None without a similarity part
    similarity_weights: Tensor | None

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        self._config, items = config, config.n_items
        # Views of one number: of a large catalogue they would be hundreds of megabytes, which
        # are replaced at once where a model is read.
        none, shape = torch.tensor(items, dtype=torch.int32), (items, config.transitions_per_item)
        self.register_buffer("transition_items", none.expand(shape))
        self.register_buffer("transition_sums", torch.zeros(()).expand(shape))
        self.register_buffer("max_request_gap", torch.tensor(MAX_REQUEST_GAP))
        popularity = torch.zeros(len(HALF_LIVES), items + 1) if config.next_basket else None
        self.register_buffer("recent_popularity", popularity)
        self.register_buffer("similar_items", None)
        self.register_buffer("similarity_weights", None)
        if kept := config.similar_items:
            weights = torch.zeros(()).expand(items, kept)
            self.similarity = ItemSimilarity(none.expand(items, kept), weights)

    @property
    def transition_counts(self) -> TransitionCounts:
        """The largest transition counts of each item, by rows of the id embedding."""
        return TransitionCounts(
            self.transition_items, self.transition_sums, self.cooccurrence_window
        )

    @property
    def cooccurrence_window(self) -> CooccurrenceWindow:
        """The weights of a user's recent events in the transition counts."""
        if self._config.next_basket:
            return BASKET_WINDOW
        return SMALL_LOG_WINDOW if self._config.small_log else SEQUENCE_WINDOW

    @property
    def similarity(self) -> ItemSimilarity | None:
        """The largest similarity weights of each item, by rows of the id embedding, if any."""
        if self.similar_items is None or self.similarity_weights is None:
            return None
        return ItemSimilarity(self.similar_items, self.similarity_weights)

    @similarity.setter
    def similarity(self, similarity: ItemSimilarity | None) -> None:
        self.similar_items, self.similarity_weights = similarity or (None, None)

    @property
    def recent_events(self) -> int:
        """Number of newest events that any of the statistics is applied to."""
        depth = self.cooccurrence_window.depth
        return depth if self.similar_items is None else max(depth, SIMILARITY_DEPTH)

    def load(
        self,
        transition_counts: TransitionCounts,
        max_request_gap: int,
        recent_popularity: Tensor | None = None,
    ) -> None:
        """Replace the statistics.

        Args:
            transition_counts: counted with the model's own `cooccurrence_window`.
            max_request_gap: microseconds, see `clamp_request_time`.
            recent_popularity: of a next-basket model, [half-lives, N + 1] as in
                `models.recommender.recent_popularity`.

        Raises:
            ValueError: for a statistic of another shape.
        """
        shape = (self._config.n_items, self._config.transitions_per_item)
        items, counts, _ = transition_counts
        if items.shape != shape or counts.shape != shape:
            raise ValueError(f"transition counts must be {shape}, not {tuple(items.shape)}")
        if recent_popularity is not None:
            own = self.recent_popularity
            if own is None or recent_popularity.shape != own.shape:
                wanted = None if own is None else tuple(own.shape)
                raise ValueError(
                    f"recent popularity must be {wanted}, not {tuple(recent_popularity.shape)}"
                )
            self.recent_popularity = recent_popularity
        self.transition_items, self.transition_sums = items, counts
        self.max_request_gap = torch.tensor(max_request_gap)

    def clamp_request_time(self, request_time: Tensor, newest: Tensor) -> Tensor:
        """Clamp a request time to at most `max_request_gap` after the newest event.

        Longer gaps hardly occur in training, so their embeddings are not learned. All int64
        microseconds.
        """
        return torch.minimum(request_time, newest + self.max_request_gap)
