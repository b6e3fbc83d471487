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

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.attention import context_only
from models.encoder import HistoryEncoder
from models.followers import ORDERED, UNORDERED, Followers, Reach
from models.heads import MultiHeadAttention, merge_heads, split_heads
from models.kinds import EventKinds, KindBias
from models.recency import POSITION_BUCKETS, RecencyBias
from models.trends import HALF_LIVES

UNBOUNDED = 2**60  # microseconds, a horizon that no request is beyond
_TREND = 0.2  # what each of the trends weighs before anything is learned


@dataclass(frozen=True, slots=True)
class RecommenderConfig:
    """The shape of a recommender. It travels with the weights.

    Raises ValueError, naming the field, for a shape that no model can have.
    """

    items: int  # rows of the id embedding
    content: int = 256  # dimension of the text embeddings
    dim: int = 128
    heads: int = 4
    blocks: int = 3  # of the history encoder; 0 leaves the sequence and the transitions out
    followers: int = 512  # kept of each item; 0 leaves the transitions out
    window: int = 240  # recent events that the encoder reads, three quarters of them at least
    dropout: float = 0.3
    tied: bool = False  # W_V = W_K
    types: int = 1  # of events
    dislike: int = -1  # the type that says what was not liked; -1 = there is none
    dislike_heads: int = 0  # the last ones of the target attention: they see dislikes alone
    baskets: bool = False  # it is asked before a basket: what was taken at one time has no order
    again: bool = False  # users come back to what they had

    def __post_init__(self) -> None:
        least = {"items": 0, "content": 1, "dim": 1, "heads": 1, "blocks": 0, "window": 1}
        least |= {"followers": 0, "types": 1, "dislike": -1, "dislike_heads": 0}
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
        for name in ("tied", "baskets", "again"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.dislike >= self.types or (self.dislike >= 0 and self.types < 2):
            raise ValueError(f"dislike must be one of several types, not {self.dislike}")
        if self.dislike_heads and (self.dislike < 0 or self.dislike_heads >= self.heads):
            raise ValueError("dislike_heads must leave other heads, and have dislikes to see")

    def typed(self, types: int, *, dislike: int, disliked: bool) -> RecommenderConfig:
        """This shape for a log of so many types of events.

        Args:
            types: how many there are.
            dislike: the one that says what was not liked, or -1.
            disliked: whether there is such an event: one head is then theirs, if another is left.
        """
        heads = 1 if disliked and self.heads > 1 else 0
        return replace(self, types=types, dislike=dislike, dislike_heads=heads)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class ItemTables(NamedTuple):
    """What the model knows of each item, computed once per model version: N items, H heads."""

    vectors: Tensor  # [N, dim] item tower
    queries: Tensor  # [H, N, d] W_Q
    keys: Tensor  # [H, N, d] W_K
    values: Tensor  # [H, N, d] W_V
    outputs: Tensor  # [H, N, d] W_O^T: what a value must point at to raise the score
    prior: Tensor  # [N]


class Recommender(nn.Module):
    """Trained by `models.train.fit`, served through its `tables`."""

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
        self.cross = MultiHeadAttention(dim, config.heads, tied=config.tied)
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
            lately: how popular each item was of late, [half-lives, N + 1] as in `models.trends`,
                where the model is one of baskets.

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
            types: int64 [...], rows of the model's types or `models.kinds.UNKNOWN`.
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

    def target_attention(
        self, tables: ItemTables, keys: Tensor, values: Tensor, bias: Tensor
    ) -> Tensor:
        """Σ_h ⟨context_h, o_h⟩ of every item of `tables` as the target of one prefix each.

        Args:
            tables: the targets, N items.
            keys: [B, H, L, d].
            values: [B, H, L, d].
            bias: [B, H, L]; -inf hides a row.

        Returns:
            Tensor: [B, N].
        """
        rows = []
        # One by one, so that the scores of one history with every item still fit the cache; and
        # by head, because batched products of this shape are far slower than plain ones.
        for own_keys, own_values, own_bias in zip(keys, values, bias, strict=True):
            total = torch.zeros_like(tables.prior)
            for head in range(len(own_bias)):
                if bool((own_bias[head] == -math.inf).all()):
                    continue  # nothing to attend to
                query, output = tables.queries[head] * keys.shape[-1] ** -0.5, tables.outputs[head]
                score = torch.mm(query, own_keys[head].T).float() + own_bias[head]
                gain = torch.mm(output, own_values[head].T).float()
                total = total + torch.linalg.vecdot(torch.softmax(score, -1), gain)
            rows.append(total)
        return torch.stack(rows)

    def target_attention_prefixes(
        self, queries: Tensor, outputs: Tensor, keys: Tensor, values: Tensor, bias: Tensor
    ) -> Tensor:
        """The same for T prefixes of each history at once, in matrix products.

        The exponential of a score factors into a part of (target, row) and a part of (prefix, row),
        e^(s_cj + b_tj) = e^(s_cj) e^(b_tj), so numerator and denominator of all prefixes are the
        products E·Wᵀ and (E ⊙ G)·Wᵀ with E = e^s [N, L], G = ⟨v_j, o_c⟩ [N, L], W = e^b [T, L]:
        L exponentials a target instead of T·L.

        Args:
            queries: of N targets for each history or for all, [B, H, N, d] or [H, N, d].
            outputs: likewise.
            keys: [B, H, L, d].
            values: [B, H, L, d].
            bias: [B, H, T, L]; -inf hides a row from a prefix; one that sees nothing has 0.

        Returns:
            Tensor: [B, T, N].
        """
        score = (queries @ keys.mT).float() / keys.shape[-1] ** 0.5  # (B, H, N, L)
        gain = outputs @ values.mT  # (B, H, N, L)
        # Softmax does not see what is subtracted from all its scores; the peaks keep e^x small.
        shared = torch.exp(score - score.detach().amax(-1, keepdim=True))
        peak = bias.detach().amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -math.inf, 0.0)  # of a prefix that sees nothing
        prefix = torch.exp(bias - peak).mT  # (B, H, L, T)
        total = (shared @ prefix).float()
        weighted = ((shared * gain) @ prefix).float()
        # A row in a prefix's future may hold the peak; what is left of the prefix is then tiny.
        return (weighted / total.clamp(min=1e-30)).sum(1).mT  # (B, N, T) -> (B, T, N)

    # ------------------------------------------------------------------ candidate generation

    @staticmethod
    def candidate_keys(tables: ItemTables) -> Tensor:
        """Keys [N, dim + H·d + 1]: the product with `candidate_query` approximates s(u, c)."""
        return torch.cat([tables.vectors, merge_heads(tables.outputs), tables.prior[:, None]], 1)

    @staticmethod
    def candidate_query(summary: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """One vector for the user, [dim + H·d + 1], that stands in for every target's attention.

        The target-dependent part of the logits is left out, so each head's context is the mean of
        the values under the softmax of the biases alone.

        Args:
            summary: h_u, [dim].
            values: [H, n, d].
            bias: [H, n]; -inf hides a row.
        """
        nothing = values.new_zeros(values.shape[0], 1, values.shape[2])
        pooled = context_only(nothing, values, values, bias=bias[:, None])  # (H, 1, d)
        return torch.cat([summary, merge_heads(pooled)[0], summary.new_ones(1)])


def identity(dimension: int) -> Recommender:
    """The model before any training: one head whose projections are the identity on content.

    Layer-normed unit vectors have length √d, so a score is √d·cos(c, j): sharp enough that the most
    similar events count most. Its values point back at content, so that the attention part is the
    mean cosine of a target with what was attended. There is no sequence part.

    Args:
        dimension: of the text embeddings.
    """
    config = RecommenderConfig(
        items=0, content=dimension, dim=dimension, heads=1, blocks=0, followers=0
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
