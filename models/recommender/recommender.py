"""The recommender: item tower, history encoder and target cross-attention as one module.

    s(u, c) = ⟨x_c, h_u⟩ + λ(h_u)·log(1 + counts) + Σ_h Σ_j α^h_cj ⟨v^h_j, o^h_c⟩ + prior_c
               sequence     transitions               target attention              popularity

x is the item tower's vector, h_u the encoder's summary of the recent events as asked at a time,
α the softmax over the user's memory with per-head position, age and type biases, v = W_V x and
o_c = W_O^T x_c. What is counted for the transitions is 2 F_u(c), how often c followed the user's
last items in other histories, and, in baskets of what users come back to, how often they took c
themselves. Where items are taken in baskets, the prior has the popularity of late in it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.attention.multihead import HeadProjections, split_heads
from models.encoder.event_types import EventEmbedding, EventTypeBias
from models.encoder.history_encoder import HistoryEncoder
from models.encoder.recency_bias import POSITION_BUCKETS, RecencyBias
from models.recommender.config import RecommenderConfig
from models.recommender.recent_popularity import HALF_LIVES
from models.recommender.target_attention import ItemTables
from models.recommender.transition_counts import (
    BASKET_WINDOW,
    SEQUENCE_WINDOW,
    CooccurrenceWindow,
    TransitionCounts,
)

MAX_REQUEST_GAP = 2**60  # microseconds, a horizon that no request is beyond
_TREND = 0.2  # what each of the trends weighs before anything is learned


class Recommender(nn.Module):
    """Trained by `models.training.fit.fit`, served through its `tables`."""

    transition_items: Tensor
    transition_sums: Tensor
    max_request_gap: Tensor
    recent_popularity: Tensor | None

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        # An embedding cannot be empty; a model without trained ids keeps one that is never read.
        self.id_embedding = nn.Embedding(max(1, config.n_items), dim)
        self.content_projection = nn.Linear(config.content_dim, dim, bias=False)
        # Content is a unit vector: at this scale its share starts as large as the id's.
        nn.init.normal_(self.id_embedding.weight, std=0.02)
        nn.init.normal_(self.content_projection.weight, std=0.02)
        self.encoder = (
            HistoryEncoder(dim, config.heads, config.blocks, config.dropout)
            if config.blocks
            else None
        )
        self.transition_scale = nn.Linear(dim, 1 + self.counts_repeats)  # λ, of each of the counts
        nn.init.zeros_(self.transition_scale.weight)
        nn.init.constant_(self.transition_scale.bias, 0.5)
        shape = (config.n_items, config.transitions_per_item)
        self.register_buffer(
            "transition_items", torch.full(shape, config.n_items, dtype=torch.int32)
        )
        self.register_buffer("transition_sums", torch.zeros(shape))
        self.register_buffer(
            "max_request_gap", torch.tensor(MAX_REQUEST_GAP)
        )  # microseconds, see `within`
        self.item_norm = nn.LayerNorm(dim)
        self.cross_attention = HeadProjections(dim, config.heads, tied=config.tied_values)
        nn.init.zeros_(
            self.cross_attention.w_o.weight
        )  # nothing is attended before something is learned
        self.recency = RecencyBias(config.heads)
        apart = (config.dislike_type, config.dislike_heads)
        self.event_embedding = EventEmbedding(config.n_event_types, dim) if config.blocks else None
        self.type_bias = (
            EventTypeBias(config.n_event_types, config.heads, *apart)
            if config.n_event_types > 1
            else None
        )
        self.prior = nn.Parameter(torch.zeros(max(1, config.n_items)))
        self.new_prior = nn.Parameter(torch.zeros(()))  # of items that were not in training
        shape = (len(HALF_LIVES), config.n_items + 1)
        self.recent_popularity_weight = (
            nn.Parameter(torch.full(shape[:1], _TREND)) if config.next_basket else None
        )
        self.register_buffer(
            "recent_popularity", torch.zeros(shape) if config.next_basket else None
        )

    @property
    def has_transitions(self) -> bool:
        """Whether there is such a part; λ is read off the summary, so that needs an encoder."""
        return self.encoder is not None and self.config.transitions_per_item > 0

    @property
    def counts_repeats(self) -> bool:
        """Whether how often a user took an item themselves is counted beside what followed."""
        return self.config.next_basket and self.config.repeat_consumption

    @property
    def transition_counts(self) -> TransitionCounts:
        """What follows each item, by rows of the id embedding."""
        return TransitionCounts(self.transition_items, self.transition_sums)

    @property
    def cooccurrence_window(self) -> CooccurrenceWindow:
        """Which of a user's events the transitions count."""
        return BASKET_WINDOW if self.config.next_basket else SEQUENCE_WINDOW

    def load_statistics(
        self,
        transition_counts: TransitionCounts,
        max_request_gap: int,
        recent_popularity: Tensor | None = None,
    ) -> None:
        """Take these as what follows each item, a horizon in microseconds, and trends.

        Args:
            kept: counted with the model's own `reach`.
            horizon: see `within`.
            lately: how popular each item was of late, [half-lives, N + 1] as in
                `models.recommender.recent_popularity`, where the model is one of baskets.

        Raises:
            ValueError: for a part of another shape.
        """
        shape = (self.config.n_items, self.config.transitions_per_item)
        if transition_counts.items.shape != shape or transition_counts.counts.shape != shape:
            raise ValueError(
                f"followers must be {shape}, not {tuple(transition_counts.items.shape)}"
            )
        if recent_popularity is not None and (
            self.recent_popularity is None
            or recent_popularity.shape != self.recent_popularity.shape
        ):
            raise ValueError(
                f"there is no room for trends of shape {tuple(recent_popularity.shape)}"
            )
        self.transition_items, self.transition_sums = (
            transition_counts.items,
            transition_counts.counts,
        )
        self.max_request_gap = torch.tensor(max_request_gap)
        if recent_popularity is not None:
            self.recent_popularity = recent_popularity

    # ------------------------------------------------------------------ item tower

    def item_vectors(self, rows: Tensor, content: Tensor, keep_id: Tensor | None = None) -> Tensor:
        """Item vectors from the id (where one was trained) and the projected text.

        Args:
            rows: int64 [...], -1 where the item has no trained id.
            content: text embeddings [..., content].
            keep_id: bool [...], False drops the id so that text alone must work.

        Returns:
            Tensor: [..., dim].
        """
        known = rows >= 0 if keep_id is None else (rows >= 0) & keep_id
        id_part = self.id_embedding(rows.clamp(min=0)) * known[..., None]
        vectors: Tensor = id_part + self.content_projection(content)
        return vectors

    def item_tables(self, rows: Tensor, content: Tensor) -> ItemTables:
        """Everything that scoring needs of each item.

        Args:
            rows: int64 [N], -1 where the item was not in training.
            content: [N, content].
        """
        vectors = self.item_vectors(rows, content)
        prior = torch.where(rows >= 0, self.prior[rows.clamp(min=0)], self.new_prior)
        if self.recent_popularity_weight is not None and self.recent_popularity is not None:
            prior = (
                prior + self.recent_popularity_weight @ self.recent_popularity[:, rows]
            )  # row -1 is that of new items
        return self.project_items(vectors, prior)

    def project_items(self, vectors: Tensor, prior: Tensor) -> ItemTables:
        """The cross-attention's projections of item vectors [N, dim]."""
        normed = self.item_norm(vectors)
        keys = self.cross_attention.keys(normed)
        values = keys if self.cross_attention.tied else self.cross_attention.values(normed)
        outputs = split_heads(normed @ self.cross_attention.w_o.weight, self.config.heads)
        return ItemTables(
            vectors, self.cross_attention.queries(normed), keys, values, outputs, prior
        )

    # ------------------------------------------------------------------ the parts

    def event_inputs(self, vectors: Tensor, types: Tensor, log_weights: Tensor) -> Tensor:
        """What the encoder is given of events: the items' vectors [..., dim], if it has no more.

        Args:
            vectors: of the items, [..., dim].
            types: int64 [...], rows of the model's types or `models.encoder.event_types.UNKNOWN`.
            log_weights: [...].
        """
        if self.event_embedding is None:
            return vectors
        read: Tensor = self.event_embedding(vectors, types, log_weights)
        return read

    def memory_bias(
        self, distance: Tensor, age: Tensor, log_weights: Tensor, types: Tensor
    ) -> Tensor:
        """The bias [H, ...] on the scores of a memory's rows; -inf hides a row from a head.

        Args:
            distance: events between a row and the newest, broadcastable against `age`.
            age: microseconds [...].
            log_weights: broadcastable against `age`.
            types: int64, likewise, as in `read`.
        """
        bias: Tensor = self.recency(distance, age) + log_weights
        if self.type_bias is None:
            return bias
        types = types[(None,) * (bias.dim() - 1 - types.dim())]  # what heads come before
        kinds: Tensor = self.type_bias(types)
        return bias + kinds

    def user_states(self, events: Tensor, timestamps: Tensor, request_times: Tensor) -> Tensor:
        """h_t of each prefix, [B, L, dim]; zero without an encoder. Arguments as the encoder's."""
        if self.encoder is None or events.shape[1] == 0:
            return torch.zeros_like(events)
        summary: Tensor = self.encoder(events, timestamps, request_times)
        return summary

    def clamp_request_time(self, request_time: Tensor, newest: Tensor) -> Tensor:
        """A request's time, no longer after the newest event than nearly all of training was.

        A time further off says nothing more, and was never learned. All int64 microseconds.
        """
        return torch.minimum(request_time, newest + self.max_request_gap)

    def transition_scores(self, user_state: Tensor, counts: Tensor) -> Tensor:
        """Σ_s λ_s(h)·log(1 + counts_s).

        Args:
            summary: h, [..., dim].
            counts: of the targets [..., S, T]: 2F, and how often the user took each, where the
                model has a scale for that.
        """
        part: Tensor = (self.transition_scale(user_state)[..., None] * torch.log1p(counts)).sum(-2)
        return part


def content_only_model(dimension: int) -> Recommender:
    """The model before any training: one head whose projections are the identity on content.

    Layer-normed unit vectors have length √d, so a score is √d·cos(c, j): sharp enough that the most
    similar events count most. Its values point back at content, so that the attention part is the
    mean cosine of a target with what was attended. There is no sequence part.

    Args:
        dimension: of the text embeddings.
    """
    config = RecommenderConfig(
        n_items=0,
        content_dim=dimension,
        dim=dimension,
        heads=1,
        blocks=0,
        transitions_per_item=0,
        tied_values=True,
    )
    model = Recommender(config)
    eye = torch.eye(dimension)
    with torch.no_grad():
        model.id_embedding.weight.zero_()
        model.content_projection.weight.copy_(eye)
        for projection in (
            model.cross_attention.w_q,
            model.cross_attention.w_k,
            model.cross_attention.w_v,
        ):
            if projection is not None:
                projection.weight.copy_(eye)
        model.cross_attention.w_o.weight.copy_(eye / dimension)
        model.recency.position.copy_(-torch.linspace(0, 1, POSITION_BUCKETS))
    return model.eval()
