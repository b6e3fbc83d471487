"""The recommender: item tower, history encoder and target cross-attention as one module.

    s(u, c) = Σ_h Σ_j α^h_cj ⟨v^h_j, o^h_c⟩ + λ(m_u)·log(1 + counts) + Σ_i S_ic + prior_c
                     attention                     transitions      similarity  popularity

x is the item vector, h_j the encoder's state of event j, and m_u the user state: the newest event's
state and the time since. The rows of the attention are events and profile entries:

    q^h_c = W_Q LN(x_c) + W_S m_u + b    k^h_j = W_K LN(x_j) + W_KS h_j
    o^h_c = W_O^T x_c                    v^h_j = W_V LN(x_j) + W_VS h_j

α is the softmax of ⟨q, k⟩ / √d with per-head position, age and type biases. A row that the encoder
has not read, as an event older than its window or a profile entry, has only its item's terms.
The transition counts are 2 F_u(c), how often c followed the user's last items in other histories; a
next-basket model with repeat consumption adds how often the user took c, and the prior of a next-
basket model includes the recent popularity. S are item similarities, of the distinct items i of the
user's newest events; only a model whose held-out cases they rank better has them.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from models.attention.attend import HeadProjections, split_heads
from models.data.interactions import Interactions
from models.encoder.event_bias import POSITION_BUCKETS, EventEmbedding, EventTypeBias, RecencyBias
from models.encoder.history_encoder import HistoryEncoder
from models.recommender.co_occurrence import (
    BASKET_WINDOW,
    SEQUENCE_WINDOW,
    SIMILARITY_DEPTH,
    SMALL_LOG_WINDOW,
    CooccurrenceWindow,
    ItemSimilarity,
    TransitionCounts,
    ease_similarity,
)
from models.recommender.recent_popularity import HALF_LIVES
from models.recommender.target_attention import ItemTables

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
    dislike_heads: int = 0  # the last heads of the target attention, which see only dislikes
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
        """Return this configuration for a log's event types; dislikes get one head if another is
        left.
        """
        heads = 1 if has_dislikes and self.attention_heads > 1 else 0
        return replace(self, n_event_types=types, dislike_type=dislike_type, dislike_heads=heads)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        return TransitionCounts(
            self.transition_items, self.transition_sums, self.cooccurrence_window
        )

    @property
    def cooccurrence_window(self) -> CooccurrenceWindow:
        if self._config.next_basket:
            return BASKET_WINDOW
        return SMALL_LOG_WINDOW if self._config.small_log else SEQUENCE_WINDOW

    @property
    def similarity(self) -> ItemSimilarity | None:
        if self.similar_items is None or self.similarity_weights is None:
            return None
        return ItemSimilarity(self.similar_items, self.similarity_weights)

    @similarity.setter
    def similarity(self, similarity: ItemSimilarity | None) -> None:
        self.similar_items, self.similarity_weights = similarity or (None, None)

    @property
    def recent_events(self) -> int:
        depth = self.cooccurrence_window.depth
        return depth if self.similar_items is None else max(depth, SIMILARITY_DEPTH)

    def load(
        self,
        transition_counts: TransitionCounts,
        max_request_gap: int,
        recent_popularity: Tensor | None = None,
    ) -> None:
        """Replace the statistics.

        The counts are of the model's own `cooccurrence_window`, `max_request_gap` is in
        microseconds, `recent_popularity` [half-lives, N + 1] that of a next-basket model.
        """
        if recent_popularity is not None:
            self.recent_popularity = recent_popularity
        self.transition_items, self.transition_sums, _ = transition_counts
        self.max_request_gap = torch.tensor(max_request_gap)

    def clamp_request_time(self, request_time: Tensor, newest: Tensor) -> Tensor:
        """Clamp request times to `max_request_gap` after the newest event, microseconds.

        Longer gaps hardly occur in training, so their embeddings are not learned.
        """
        return torch.minimum(request_time, newest + self.max_request_gap)


class StateProjections(nn.Module):
    """Projects the encoder's states [..., dim] into the target attention, [..., H, d] each.

    A user state, of the newest event, gives an addend to the query of every target; the state of
    each event an addend to its key and its value.
    """

    def __init__(self, dim: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, heads * size)
        self.key = nn.Linear(dim, heads * size, bias=False)
        self.value = nn.Linear(dim, heads * size, bias=False)
        for layer in (self.query, self.key):
            nn.init.normal_(layer.weight, std=0.5 / dim**0.5)
        nn.init.zeros_(self.query.bias)
        nn.init.normal_(self.value.weight, std=0.2 / dim**0.5)
        with torch.no_grad():
            self.value.weight += identity_copies(dim, heads * size)

    def queries(self, states: Tensor) -> Tensor:
        return self._split(self.query(states))

    def keys(self, states: Tensor) -> Tensor:
        return self._split(self.key(states))

    def values(self, states: Tensor) -> Tensor:
        return self._split(self.value(states))

    def query_moment(self) -> Tensor:
        """Return an estimate of the mean of q qᵀ over user queries q, [H, d, d].

        User states are layer-normed, so that about the identity is the mean of m mᵀ.
        """
        dim = self.query.weight.shape[1]
        weight = self.query.weight.view(self.heads, -1, dim)
        bias = self.query.bias.view(self.heads, -1)
        return weight @ weight.mT + bias[:, :, None] * bias[:, None]

    def _split(self, projected: Tensor) -> Tensor:
        size = projected.shape[-1] // self.heads
        return projected.reshape(*projected.shape[:-1], self.heads, size)


def initialise_readout(attention: HeadProjections, states: StateProjections | None) -> None:
    """Let a target attention start with the mean of the newest states, whatever the target.

    Without an encoder, and so without states, it adds nothing before it is trained.
    """
    if states is None:
        nn.init.zeros_(attention.w_o.weight)
        return
    for projection in (attention.w_q, attention.w_k, attention.w_v):
        if projection is not None:
            nn.init.zeros_(projection.weight)
    dim, width = attention.w_o.weight.shape
    with torch.no_grad():
        attention.w_o.weight.copy_(identity_copies(dim, width).T / (width / dim))


def identity_copies(dim: int, width: int) -> Tensor:
    """Identities of `dim` below one another, as many as fill `width` rows: [width, dim]."""
    return torch.eye(dim).repeat(-(-width // dim), 1)[:width]


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
        return self.encoder is not None and self.config.transitions_per_item > 0

    @property
    def counts_repeats(self) -> bool:
        return self.config.next_basket and self.config.repeat_consumption

    def set_similarity(self, similarity: ItemSimilarity | None) -> None:
        """Replace the similarity part, or remove it. The table is of the model's items."""
        kept = 0 if similarity is None else similarity.items.shape[1]
        self.config = replace(self.config, similar_items=kept)
        self.statistics.similarity = similarity

    # ------------------------------------------------------------------ item tower

    def item_vectors(self, rows: Tensor, content: Tensor, keep_id: Tensor | None = None) -> Tensor:
        """Add the id embedding and the projected text embedding, [..., dim].

        rows int64 [...], -1 for an item without a trained id; content [..., D]; `keep_id` bool
        [...] is False where the id is dropped so that text alone must work.
        """
        known = rows >= 0 if keep_id is None else (rows >= 0) & keep_id
        id_part = self.id_embedding(rows.clamp(min=0)) * known[..., None]
        vectors: Tensor = id_part + self.content_projection(content)
        return vectors

    def item_tables(self, rows: Tensor, content: Tensor) -> ItemTables:
        """Precompute everything that scoring needs of each item.

        rows int64 [N], -1 for an item that was not in training; content, text embeddings [N, D].
        """
        vectors = self.item_vectors(rows, content)
        prior = torch.where(rows >= 0, self.prior[rows.clamp(min=0)], self.new_prior)
        popularity = self.statistics.recent_popularity
        if self.recent_popularity_weight is not None and popularity is not None:
            # Row -1, the last, is that of new items.
            prior = prior + self.recent_popularity_weight @ popularity[:, rows]
        return self.project_items(vectors, prior)

    def project_items(self, vectors: Tensor, prior: Tensor) -> ItemTables:
        normed, attention = self.item_norm(vectors), self.cross_attention
        keys, values = attention.keys_values(normed)
        outputs = split_heads(vectors @ attention.w_o.weight, attention.heads)
        return ItemTables(vectors, attention.queries(normed), keys, values, outputs, prior)

    # ------------------------------------------------------------------ parts of the score

    def event_inputs(self, vectors: Tensor, types: Tensor, log_weights: Tensor) -> Tensor:
        """Compute the encoder's inputs [..., dim] from item vectors, event types and weights.

        `types` int64 [...] are rows of the model's types or `models.encoder.event_bias.UNKNOWN`.
        """
        if self.event_embedding is None:
            return vectors
        inputs: Tensor = self.event_embedding(vectors, types, log_weights)
        return inputs

    def memory_bias(
        self, distance: Tensor, age: Tensor, log_weights: Tensor, types: Tensor
    ) -> Tensor:
        """Compute the score bias [H, ...] of a memory's rows; -inf hides a row from a head.

        `distance` counts events between a row and the newest, `age` is in microseconds [...]; the
        others, `types` as in `event_inputs`, broadcast against it.
        """
        bias: Tensor = self.recency(distance, age) + log_weights
        if self.type_bias is None:
            return bias
        types = types[(None,) * (bias.dim() - 1 - types.dim())]  # aligned behind the head axis
        type_bias: Tensor = self.type_bias(types)
        return bias + type_bias

    def event_states(self, events: Tensor, timestamps: Tensor) -> Tensor:
        """The encoder's state of each event, [B, L, dim]; as `HistoryEncoder.forward`."""
        if self.encoder is None or events.shape[1] == 0:
            return torch.zeros_like(events)
        states: Tensor = self.encoder(events, timestamps)
        return states

    def user_states(self, states: Tensor, timestamps: Tensor, request_times: Tensor) -> Tensor:
        """M [..., dim] as of `HistoryEncoder.at_request`; zero without an encoder."""
        if self.encoder is None:
            return states
        return self.encoder.at_request(states, timestamps, request_times)

    def attended_rows(
        self, vectors: Tensor, states: Tensor, has_state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute keys and values, [B, H, L, d] each, of the events of windows.

        vectors of items and states of the encoder, [B, L, dim] each; has_state [B, L, 1] is 0 for a
        row with only the key and the value of its item.
        """
        keys, values = self.cross_attention.keys_values(self.item_norm(vectors))
        if self.state_attention is None:
            return keys, values
        read = has_state[..., None].to(keys.dtype)
        keys = keys + (self.state_attention.keys(states) * read).transpose(1, 2)
        return keys, values + (self.state_attention.values(states) * read).transpose(1, 2)

    def read_out(self, values: Tensor, scores: Tensor) -> Tensor:
        """Attend by scores that are the same for every target: r [B, dim].

        Its product with an item's vector is the attention part. values [B, H, L, d]; scores [B, H,
        L], -inf hides a row; a head without a visible row adds nothing.
        """
        weights = torch.softmax(scores, -1).nan_to_num(0.0).to(values.dtype)
        readout: Tensor = self.cross_attention.w_o((weights[:, :, None] @ values).flatten(1))
        return readout

    def user_query(self, user_state: Tensor) -> Tensor:
        """Project user states [..., dim] to the addend of every query, [..., H, d]."""
        if self.state_attention is None:
            heads, size = self.config.attention_heads, self.config.dim // self.config.heads
            return user_state.new_zeros(*user_state.shape[:-1], heads, size)
        queries: Tensor = self.state_attention.queries(user_state)
        return queries

    def transition_scores(self, user_state: Tensor, counts: Tensor) -> Tensor:
        """Compute Σ_s λ_s(m)·log(1 + counts_s) from user states m [..., dim].

        counts [..., S, T] of the targets: 2F and, if the model `counts_repeats`, the user's own
        counts.
        """
        scale: Tensor = self.transition_scale(user_state)[..., None]
        return (scale * torch.log1p(counts)).sum(-2)


def content_only_model(dimension: int) -> Recommender:
    """Build the untrained model for text embeddings: one head with the identity as projections.

    Layer-normed unit vectors have length √d, so a score is √d·cos(c, j): sharp enough that the most
    similar events count most. Its values point back at content, so that the attention part is the
    mean cosine of a target with the attended events.
    """
    config = RecommenderConfig(
        n_items=0, content_dim=dimension, dim=dimension, heads=1, blocks=0, transitions_per_item=0,
        attention_heads=1, tied_values=True,
    )  # fmt: skip
    model = Recommender(config)
    attention, eye = model.cross_attention, torch.eye(dimension)
    with torch.no_grad():
        model.id_embedding.weight.zero_()
        model.content_projection.weight.copy_(eye)
        for projection in (attention.w_q, attention.w_k, attention.w_v):
            if projection is not None:
                projection.weight.copy_(eye)
        attention.w_o.weight.copy_(eye / dimension**0.5)
        model.recency.position.copy_(-torch.linspace(0, 1, POSITION_BUCKETS))
    return model.eval()


EASE_NAME, TRANSITIONS, BOUGHT_BEFORE = "EASE", "transition counts", "bought before"
_TIES = 1e-6  # of popularity, which orders what a baseline scores alike


def baseline_model(model: Recommender, name: str, log: Interactions) -> Recommender | None:
    """Return a copy of a model in eval mode that scores as a baseline does, by parts of the model.

    `log` has its training events; collective over its shards. The attention adds nothing, and the
    prior no more than an order among equals. Similarities are the largest of each item, and
    transitions those of the model's own window. None for another name than `EASE_NAME`,
    `TRANSITIONS` and `BOUGHT_BEFORE`, or one that the model has no part for.
    """
    parts = {TRANSITIONS: 0, BOUGHT_BEFORE: 1}
    own = model.transition_scale.out_features if model.has_transitions else 0
    if name != EASE_NAME and parts.get(name, own) >= own:
        return None
    served = copy.deepcopy(model)
    popularity = torch.from_numpy(log.liked().total_item_counts() + 1).float().log()
    with torch.no_grad():
        served.cross_attention.w_o.weight.zero_()
        served.transition_scale.weight.zero_()
        served.transition_scale.bias.zero_()
        served.prior.copy_(_TIES * popularity)
        served.new_prior.zero_()
        if served.recent_popularity_weight is not None:
            served.recent_popularity_weight.zero_()
        if name in parts:
            served.transition_scale.bias[parts[name]] = 1.0
    served.set_similarity(ease_similarity(log) if name == EASE_NAME else None)
    return served
