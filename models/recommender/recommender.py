"""The recommender: item tower, history encoder and target cross-attention as one module.

    s(u, c) = Σ_h Σ_j α^h_cj ⟨v^h_j, o^h_c⟩ + λ(m_u)·log(1 + counts) + Σ_i S_ic + prior_c
                     attention                     transitions      similarity  popularity

x is the item vector, h_j the encoder's state of event j, and m_u the user state: the newest event's
state and the time since. The rows of the attention are events and profile entries:

    q^h_c = W_Q LN(x_c) + W_S m_u + b    k^h_j = W_K LN(x_j) + W_KS h_j
    o^h_c = W_O^T x_c                    v^h_j = W_V LN(x_j) + W_VS h_j

α is the softmax of ⟨q, k⟩ / √d with per-head position, age and type biases. A row that the encoder
has not read, as an event older than its window or a profile entry, has the terms of its item alone.
The transition counts are 2 F_u(c), how often c followed the user's last items in other histories;
a next-basket model with repeat consumption adds how often the user took c, and the prior of a
next-basket model includes the recent popularity. S are item similarities, of the distinct items i
of the user's newest events; only a model whose held-out cases they rank better has them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from models.attention.multihead import HeadProjections, split_heads
from models.encoder.event_types import EventEmbedding, EventTypeBias
from models.encoder.history_encoder import HistoryEncoder
from models.encoder.recency_bias import RecencyBias
from models.recommender.config import RecommenderConfig
from models.recommender.item_similarity import ItemSimilarity
from models.recommender.log_statistics import LogStatistics
from models.recommender.recent_popularity import HALF_LIVES
from models.recommender.state_projections import StateProjections, initialise_readout
from models.recommender.target_attention import ItemTables

_POPULARITY_WEIGHT = 0.2  # initial weight of each recent popularity


class Recommender(nn.Module):
    """Trained by `models.training.fit.fit`, served through its `item_tables`."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        self.config = config
        dim, heads, items = config.dim, config.heads, config.n_items
        # An embedding cannot be empty; a model without trained ids keeps one that is never read.
        self.id_embedding = nn.Embedding(max(1, items), dim)
        self.content_projection = nn.Linear(config.content_dim, dim, bias=False)
        # Content is a unit vector: at this scale its share starts as large as the id's.
        nn.init.normal_(self.id_embedding.weight, std=0.02)
        nn.init.normal_(self.content_projection.weight, std=0.02)
        self.encoder = (
            HistoryEncoder(dim, heads, config.blocks, config.dropout) if config.blocks else None
        )
        self.transition_scale = nn.Linear(dim, 1 + self.counts_repeats)  # λ of each count
        nn.init.zeros_(self.transition_scale.weight)
        nn.init.constant_(self.transition_scale.bias, 0.5)
        self.statistics = LogStatistics(config)
        self.item_norm = nn.LayerNorm(dim)
        heads, size = config.attention_heads, dim // config.heads
        self.cross_attention = HeadProjections(dim, heads, size, tied=config.tied_values)
        self.state_attention = StateProjections(dim, heads, size) if config.blocks else None
        initialise_readout(self.cross_attention, self.state_attention)
        self.recency = RecencyBias(heads)
        types, dislikes = config.n_event_types, (config.dislike_type, config.dislike_heads)
        self.event_embedding = EventEmbedding(types, dim) if config.blocks else None
        self.type_bias = EventTypeBias(types, heads, *dislikes) if types > 1 else None
        self.prior = nn.Parameter(torch.zeros(max(1, items)))
        self.new_prior = nn.Parameter(torch.zeros(()))  # of items that were not in training
        weights = torch.full((len(HALF_LIVES),), _POPULARITY_WEIGHT)
        self.recent_popularity_weight = nn.Parameter(weights) if config.next_basket else None

    @property
    def has_transitions(self) -> bool:
        """Report whether there is a transition part; λ is a function of the user state."""
        return self.encoder is not None and self.config.transitions_per_item > 0

    @property
    def counts_repeats(self) -> bool:
        """Report whether the user's own count of an item is a second transition count."""
        return self.config.next_basket and self.config.repeat_consumption

    def set_similarity(self, similarity: ItemSimilarity | None) -> None:
        """Replace the similarity part, or remove it. The table is of the model's items."""
        kept = 0 if similarity is None else similarity.items.shape[1]
        self.config = replace(self.config, similar_items=kept)
        self.statistics.similarity = similarity

    # ------------------------------------------------------------------ item tower

    def item_vectors(self, rows: Tensor, content: Tensor, keep_id: Tensor | None = None) -> Tensor:
        """Compute item vectors from the id embedding and the projected text embedding.

        Args:
            rows: int64 [...], -1 for an item without a trained id.
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
        """Precompute everything that scoring needs of each item.

        Args:
            rows: int64 [N], -1 for an item that was not in training.
            content: text embeddings [N, content].
        """
        vectors = self.item_vectors(rows, content)
        prior = torch.where(rows >= 0, self.prior[rows.clamp(min=0)], self.new_prior)
        popularity = self.statistics.recent_popularity
        if self.recent_popularity_weight is not None and popularity is not None:
            # Row -1, the last, is that of new items.
            prior = prior + self.recent_popularity_weight @ popularity[:, rows]
        return self.project_items(vectors, prior)

    def project_items(self, vectors: Tensor, prior: Tensor) -> ItemTables:
        """Project item vectors [N, dim] with the cross-attention's matrices."""
        normed, attention = self.item_norm(vectors), self.cross_attention
        keys, values = attention.keys_values(normed)
        outputs = split_heads(vectors @ attention.w_o.weight, attention.heads)
        return ItemTables(vectors, attention.queries(normed), keys, values, outputs, prior)

    # ------------------------------------------------------------------ parts of the score

    def event_inputs(self, vectors: Tensor, types: Tensor, log_weights: Tensor) -> Tensor:
        """Compute the encoder's inputs [..., dim] from item vectors, event types and weights.

        `types` int64 [...] are rows of the model's types or `models.encoder.event_types.UNKNOWN`.
        """
        if self.event_embedding is None:
            return vectors
        inputs: Tensor = self.event_embedding(vectors, types, log_weights)
        return inputs

    def memory_bias(
        self, distance: Tensor, age: Tensor, log_weights: Tensor, types: Tensor
    ) -> Tensor:
        """Compute the score bias [H, ...] of a memory's rows; -inf hides a row from a head.

        Args:
            distance: events between a row and the newest, broadcastable against `age`.
            age: microseconds [...].
            log_weights: broadcastable against `age`.
            types: int64, likewise, as in `event_inputs`.
        """
        bias: Tensor = self.recency(distance, age) + log_weights
        if self.type_bias is None:
            return bias
        types = types[(None,) * (bias.dim() - 1 - types.dim())]  # aligned behind the head axis
        type_bias: Tensor = self.type_bias(types)
        return bias + type_bias

    def event_states(self, events: Tensor, timestamps: Tensor) -> Tensor:
        """Compute the encoder's state of each event, [B, L, dim].

        Arguments as in `HistoryEncoder.forward`.
        """
        if self.encoder is None or events.shape[1] == 0:
            return torch.zeros_like(events)
        states: Tensor = self.encoder(events, timestamps)
        return states

    def user_states(self, states: Tensor, timestamps: Tensor, request_times: Tensor) -> Tensor:
        """Compute m [..., dim] from the states of newest events; zero without an encoder.

        Arguments as in `HistoryEncoder.at_request`.
        """
        if self.encoder is None:
            return states
        return self.encoder.at_request(states, timestamps, request_times)

    def attended_rows(
        self, vectors: Tensor, states: Tensor, has_state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute keys and values, [B, H, L, d] each, of the events of windows.

        Args:
            vectors: item vectors, [B, L, dim].
            states: of the encoder, [B, L, dim].
            has_state: [B, L, 1], 0 for a row with the key and the value of its item alone.
        """
        keys, values = self.cross_attention.keys_values(self.item_norm(vectors))
        if self.state_attention is None:
            return keys, values
        read = has_state[..., None].to(keys.dtype)
        keys = keys + (self.state_attention.keys(states) * read).transpose(1, 2)
        return keys, values + (self.state_attention.values(states) * read).transpose(1, 2)

    def read_out(self, values: Tensor, scores: Tensor) -> Tensor:
        """Attend by scores that are the same for every target.

        Args:
            values: [B, H, L, d].
            scores: [B, H, L]; -inf hides a row; without a visible row a head adds nothing.

        Returns:
            Tensor: r [B, dim], whose product with an item's vector is the attention part.
        """
        weights = torch.softmax(scores, -1).nan_to_num(0.0).to(values.dtype)
        readout: Tensor = self.cross_attention.w_o((weights[:, :, None] @ values).flatten(1))
        return readout

    def user_query(self, user_state: Tensor) -> Tensor:
        """Project user states [..., dim] to the addend of every target's query, [..., H, d].

        Zero without an encoder.
        """
        if self.state_attention is None:
            heads, size = self.config.attention_heads, self.config.dim // self.config.heads
            return user_state.new_zeros(*user_state.shape[:-1], heads, size)
        queries: Tensor = self.state_attention.queries(user_state)
        return queries

    def transition_scores(self, user_state: Tensor, counts: Tensor) -> Tensor:
        """Compute Σ_s λ_s(m)·log(1 + counts_s).

        Args:
            user_state: m, [..., dim].
            counts: of the targets [..., S, T]: 2F and, if the model `counts_repeats`, the user's
                own counts.
        """
        scale: Tensor = self.transition_scale(user_state)[..., None]
        return (scale * torch.log1p(counts)).sum(-2)
