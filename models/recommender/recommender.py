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
from models.encoder.event_types import EventKinds, KindBias
from models.encoder.history_encoder import HistoryEncoder
from models.encoder.recency_bias import POSITION_BUCKETS, RecencyBias
from models.recommender.config import RecommenderConfig
from models.recommender.recent_popularity import HALF_LIVES
from models.recommender.target_attention import ItemTables
from models.recommender.transition_counts import ORDERED, UNORDERED, Followers, Reach

UNBOUNDED = 2**60  # microseconds, a horizon that no request is beyond
_TREND = 0.2  # what each of the trends weighs before anything is learned


class Recommender(nn.Module):
    """Trained by `models.training.fit.fit`, served through its `tables`."""

    columns: Tensor
    counts: Tensor
    horizon: Tensor
    lately: Tensor | None

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        # An embedding cannot be empty; a model without trained ids keeps one that is never read.
        self.ids = nn.Embedding(max(1, config.items), dim)
        self.content = nn.Linear(config.content, dim, bias=False)
        # Content is a unit vector: at this scale its share starts as large as the id's.
        nn.init.normal_(self.ids.weight, std=0.02)
        nn.init.normal_(self.content.weight, std=0.02)
        self.encoder = (
            HistoryEncoder(dim, config.heads, config.blocks, config.dropout)
            if config.blocks
            else None
        )
        self.scale = nn.Linear(dim, 1 + self.counts_own)  # λ, of each of the counts
        nn.init.zeros_(self.scale.weight)
        nn.init.constant_(self.scale.bias, 0.5)
        shape = (config.items, config.followers)
        self.register_buffer("columns", torch.full(shape, config.items, dtype=torch.int32))
        self.register_buffer("counts", torch.zeros(shape))
        self.register_buffer("horizon", torch.tensor(UNBOUNDED))  # microseconds, see `within`
        self.norm = nn.LayerNorm(dim)
        self.cross = HeadProjections(dim, config.heads, tied=config.tied)
        nn.init.zeros_(self.cross.w_o.weight)  # nothing is attended before something is learned
        self.recency = RecencyBias(config.heads)
        apart = (config.dislike, config.dislike_heads)
        self.kinds = EventKinds(config.types, dim) if config.blocks else None
        self.kind_bias = KindBias(config.types, config.heads, *apart) if config.types > 1 else None
        self.prior = nn.Parameter(torch.zeros(max(1, config.items)))
        self.new_prior = nn.Parameter(torch.zeros(()))  # of items that were not in training
        shape = (len(HALF_LIVES), config.items + 1)
        self.trend = nn.Parameter(torch.full(shape[:1], _TREND)) if config.baskets else None
        self.register_buffer("lately", torch.zeros(shape) if config.baskets else None)

    @property
    def has_transitions(self) -> bool:
        """Whether there is such a part; λ is read off the summary, so that needs an encoder."""
        return self.encoder is not None and self.config.followers > 0

    @property
    def counts_own(self) -> bool:
        """Whether how often a user took an item themselves is counted beside what followed."""
        return self.config.baskets and self.config.again

    @property
    def followers(self) -> Followers:
        """What follows each item, by rows of the id embedding."""
        return Followers(self.columns, self.counts)

    @property
    def reach(self) -> Reach:
        """Which of a user's events the transitions count."""
        return UNORDERED if self.config.baskets else ORDERED

    def memorise(self, kept: Followers, horizon: int, lately: Tensor | None = None) -> None:
        """Take these as what follows each item, a horizon in microseconds, and trends.

        Args:
            kept: counted with the model's own `reach`.
            horizon: see `within`.
            lately: how popular each item was of late, [half-lives, N + 1] as in
                `models.recommender.recent_popularity`, where the model is one of baskets.

        Raises:
            ValueError: for a part of another shape.
        """
        shape = (self.config.items, self.config.followers)
        if kept.columns.shape != shape or kept.counts.shape != shape:
            raise ValueError(f"followers must be {shape}, not {tuple(kept.columns.shape)}")
        if lately is not None and (self.lately is None or lately.shape != self.lately.shape):
            raise ValueError(f"there is no room for trends of shape {tuple(lately.shape)}")
        self.columns, self.counts = kept.columns, kept.counts
        self.horizon = torch.tensor(horizon)
        if lately is not None:
            self.lately = lately

    # ------------------------------------------------------------------ item tower

    def tower(self, rows: Tensor, content: Tensor, keep_id: Tensor | None = None) -> Tensor:
        """Item vectors from the id (where one was trained) and the projected text.

        Args:
            rows: int64 [...], -1 where the item has no trained id.
            content: text embeddings [..., content].
            keep_id: bool [...], False drops the id so that text alone must work.

        Returns:
            Tensor: [..., dim].
        """
        known = rows >= 0 if keep_id is None else (rows >= 0) & keep_id
        id_part = self.ids(rows.clamp(min=0)) * known[..., None]
        vectors: Tensor = id_part + self.content(content)
        return vectors

    def tables(self, rows: Tensor, content: Tensor) -> ItemTables:
        """Everything that scoring needs of each item.

        Args:
            rows: int64 [N], -1 where the item was not in training.
            content: [N, content].
        """
        vectors = self.tower(rows, content)
        prior = torch.where(rows >= 0, self.prior[rows.clamp(min=0)], self.new_prior)
        if self.trend is not None and self.lately is not None:
            prior = prior + self.trend @ self.lately[:, rows]  # row -1 is that of new items
        return self.project(vectors, prior)

    def project(self, vectors: Tensor, prior: Tensor) -> ItemTables:
        """The cross-attention's projections of item vectors [N, dim]."""
        normed = self.norm(vectors)
        keys = self.cross.keys(normed)
        values = keys if self.cross.tied else self.cross.values(normed)
        outputs = split_heads(normed @ self.cross.w_o.weight, self.config.heads)
        return ItemTables(vectors, self.cross.queries(normed), keys, values, outputs, prior)

    # ------------------------------------------------------------------ the parts

    def read(self, vectors: Tensor, types: Tensor, log_weights: Tensor) -> Tensor:
        """What the encoder is given of events: the items' vectors [..., dim], if it has no more.

        Args:
            vectors: of the items, [..., dim].
            types: int64 [...], rows of the model's types or `models.encoder.event_types.UNKNOWN`.
            log_weights: [...].
        """
        if self.kinds is None:
            return vectors
        read: Tensor = self.kinds(vectors, types, log_weights)
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
        if self.kind_bias is None:
            return bias
        types = types[(None,) * (bias.dim() - 1 - types.dim())]  # what heads come before
        kinds: Tensor = self.kind_bias(types)
        return bias + kinds

    def summaries(self, events: Tensor, timestamps: Tensor, asked: Tensor) -> Tensor:
        """h_t of each prefix, [B, L, dim]; zero without an encoder. Arguments as the encoder's."""
        if self.encoder is None or events.shape[1] == 0:
            return torch.zeros_like(events)
        summary: Tensor = self.encoder(events, timestamps, asked)
        return summary

    def within(self, asked: Tensor, newest: Tensor) -> Tensor:
        """A request's time, no longer after the newest event than nearly all of training was.

        A time further off says nothing more, and was never learned. All int64 microseconds.
        """
        return torch.minimum(asked, newest + self.horizon)

    def transitions(self, summary: Tensor, counts: Tensor) -> Tensor:
        """Σ_s λ_s(h)·log(1 + counts_s).

        Args:
            summary: h, [..., dim].
            counts: of the targets [..., S, T]: 2F, and how often the user took each, where the
                model has a scale for that.
        """
        part: Tensor = (self.scale(summary)[..., None] * torch.log1p(counts)).sum(-2)
        return part


def identity(dimension: int) -> Recommender:
    """The model before any training: one head whose projections are the identity on content.

    Layer-normed unit vectors have length √d, so a score is √d·cos(c, j): sharp enough that the most
    similar events count most. Its values point back at content, so that the attention part is the
    mean cosine of a target with what was attended. There is no sequence part.

    Args:
        dimension: of the text embeddings.
    """
    config = RecommenderConfig(
        items=0, content=dimension, dim=dimension, heads=1, blocks=0, followers=0, tied=True
    )
    model = Recommender(config)
    eye = torch.eye(dimension)
    with torch.no_grad():
        model.ids.weight.zero_()
        model.content.weight.copy_(eye)
        for projection in (model.cross.w_q, model.cross.w_k, model.cross.w_v):
            if projection is not None:
                projection.weight.copy_(eye)
        model.cross.w_o.weight.copy_(eye / dimension)
        model.recency.position.copy_(-torch.linspace(0, 1, POSITION_BUCKETS))
    return model.eval()
