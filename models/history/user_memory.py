"""A user's memory: keys and values of events and profile entries, and the encoder's user state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.kv_memory import KeyValueMemory, gather_rows
from models.attention.partial_softmax import KVBlock
from models.catalogue.snapshot import Snapshot
from models.encoder.event_bias import FARTHEST, UNKNOWN, is_liked
from models.encoder.history_encoder import EncoderCache
from models.history.encoded_history import EncodedHistory, encode, types_and_log_weights
from models.history.long_history import CollapsedHistory
from models.history.user_history import UserHistory, attendable_events
from models.index.ann_index import IndexKind
from models.index.memory_attention import Indexes, index_heads
from models.recommender.recommender import Recommender

_KEPT_PARTS = 20_000  # trained items at most of which a memory keeps transitions: 80 kB
NEWEST_LEFT_OUT = 8  # events without each of which a memory is encoded anew, to explain scores


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class UserMemory:
    """Keys and values of the rows that can be attended, m of them: events, then profile entries."""

    memory: KeyValueMemory  # keys and values [m, H, d]
    bias: Tensor  # [H, m], the memory's: recency + log weight + type; -inf = not for this head
    rows: Tensor  # int64 [m] item rows, -1 where the row is no item
    source: NDArray[np.int64]  # [m] event of the history; -1 - i is profile entry i
    distance: Tensor  # int64 [m] events between this one and the newest
    age: Tensor  # int64 [m] microseconds at the request
    log_weights: Tensor  # [m]
    types: Tensor  # int64 [m] rows of the model's types, `UNKNOWN` for the profile
    user_state: Tensor  # [dim] m_u, zero without events
    query: Tensor  # [H, d] of the user state, added to the query of every target
    encoded_rows: Tensor  # int64 [n] memory rows of the events in `encoded`, oldest first
    recent: Tensor  # int64 [r] memory rows of the newest events on items, newest first
    recent_items: Tensor  # int64 [r] their rows of the id embedding, -1 = not trained
    # Parts of the scores of all N trained items, which depend on the user alone. The last entry, 0,
    # is of the other items, whose row is -1.
    transitions: Tensor | None  # [N + 1]; None where they depend on more, and of many items
    similarity: Tensor | None  # [N + 1]; None without this part
    history: UserHistory  # the history that this was built from
    at: int  # microseconds, the request's time, or one of which every age is in the same bucket
    encoded: EncodedHistory | None  # the states of the newest events; None without an encoder
    collapsed: CollapsedHistory | None = None  # of a long history, the events before these
    collapsed_count: int = 0  # of events in `collapsed` when this was built
    remainder: tuple[float, float] = (0, 0)  # events in a last row that raise a score, lower it
    built: dict[IndexKind, Indexes] = field(default_factory=dict)  # of its rows, once asked for

    def __len__(self) -> int:
        older = 0 if self.collapsed is None else self.collapsed.items.attendable
        return len(self.memory) + older

    @property
    def block(self) -> KVBlock:
        """The rows of the memory itself, heads first."""
        memory = self.memory
        return KVBlock(memory.keys.transpose(0, 1), memory.values.transpose(0, 1), self.bias)

    def indexes(self, kind: IndexKind) -> Indexes:
        """Return FAISS's index of each head, which is kept with the memory."""
        if kind not in self.built:
            self.built[kind] = index_heads(self.block, kind)
        return self.built[kind]

    @property
    def nbytes(self) -> int:
        """Bytes held, without the history, the older events and the tables.

        Indexes count once they are built. The matrix of each head that candidates keep beside a
        memory is counted, and what explanations keep, of it without each of the newest events.
        """
        parts = (
            *(self.memory.keys, self.memory.values, self.bias, self.rows, self.distance, self.age),
            *(self.log_weights, self.types, self.user_state, self.query),
            *(self.encoded_rows, self.recent, self.recent_items),
        )
        own = sum(part.nbytes for part in parts) + self.source.nbytes
        own += sum(index.nbytes for heads in list(self.built.values()) for index in heads)
        shared = self.transitions, self.similarity
        own += sum(each.nbytes for each in shared if each is not None)
        if self.encoded is None:
            return own
        left_out = min(NEWEST_LEFT_OUT, len(self.encoded.cache))
        # Biases of all rows without each, and a key and a value of each pair.
        own += left_out * (self.bias.nbytes + left_out * self.query.nbytes)
        own += self.user_state.nbytes + self.query.nbytes * self.query.shape[-1]
        return own + self.encoded.nbytes

    def taken(self, dislike: int) -> tuple[Tensor, Tensor]:
        """Item rows [r] of the newest events on items, newest first, and bool [r]: not disliked.

        Args:
            dislike: the model's type of dislikes, or -1.
        """
        return self.rows[self.recent], is_liked(self.types[self.recent], dislike)


@torch.inference_mode()
def build_memory(
    snapshot: Snapshot,
    history: UserHistory,
    at: int,
    *,
    encoded: EncodedHistory | None = None,
    collapsed: CollapsedHistory | None = None,
) -> UserMemory:
    """Build the memory of a history: events that are not visible count as if they never happened.

    Args:
        snapshot: whose tables hold the keys and values.
        history: what the requester did.
        at: the request's time, microseconds UTC; an event after it has age 0.
        encoded: from `encode` or an earlier memory, where there is one; used as `encode` says.
        collapsed: its first events, collapsed; the memory's rows are then those of the others.
    """
    if collapsed is not None:
        count = collapsed.items.count
        newer = history.newest(count, collapsed.items.attendable)
        near = build_memory(snapshot, newer, at, encoded=encoded)
        source = np.where(near.source < 0, near.source, near.source + count)
        return replace(near, source=source, collapsed=collapsed, collapsed_count=count)
    tables = snapshot.tables
    source, rows = attendable_events(snapshot, history)
    keys = _heads_last(tables.keys, rows)  # (n, H, d)
    values = _heads_last(tables.values, rows)
    own = [(at_row, history.vectors[int(event)]) for at_row, event in enumerate(source)
           if int(event) in history.vectors] if history.vectors else []  # fmt: skip
    for at_row, (key, value) in own:
        row = int(rows[at_row])
        alone = row < 0 or not snapshot.has_vector[row]  # no item to take a missing one from: K = V
        own_key = value if key is None and alone else key
        own_value = key if value is None and alone else value
        if own_key is not None:
            keys[at_row] = snapshot.projected(own_key).keys[:, 0]
        if own_value is not None:
            values[at_row] = snapshot.projected(own_value).values[:, 0]
    types, log_weights = types_and_log_weights(history, source)
    times = torch.from_numpy(history.timestamps[source])
    distance = torch.arange(len(source) - 1, -1, -1)
    age = (at - times).clamp(min=0)

    encoded = encode(snapshot, history, source, rows, encoded)
    on_items = (rows >= 0).nonzero().flatten()
    projections = snapshot.model.state_attention
    encoded_rows = on_items[len(on_items) - (0 if encoded is None else len(encoded.cache)) :]
    if encoded is not None and projections is not None and len(encoded_rows):
        # Rows that the encoder did not read keep the keys and values of their items alone.
        keys[encoded_rows] += projections.keys(encoded.cache.states)
        values[encoded_rows] += projections.values(encoded.cache.states)
    cache = None if encoded is None else encoded.cache
    user_state = user_state_at(snapshot.model, cache, at)
    # One more than count, so that another takes the place of one that is left out.
    recent = on_items.flip(0)[: snapshot.model.statistics.recent_events + 1]
    recent_items = snapshot.trained_rows[rows[recent]]
    liked = is_liked(types[recent], snapshot.model.config.dislike_type)
    profile = _profile(snapshot, history)
    if profile is not None:
        extra_keys, extra_values, extra_rows = profile
        count = len(extra_rows)
        keys, values = torch.cat([keys, extra_keys]), torch.cat([values, extra_values])
        rows = torch.cat([rows, extra_rows])
        # A profile is timeless: it weighs as the oldest of events do.
        distance = torch.cat([distance, torch.full((count,), FARTHEST)])
        age = torch.cat([age, torch.full((count,), FARTHEST)])
        log_weights = torch.cat([log_weights, torch.zeros(count)])
        types = torch.cat([types, torch.full((count,), UNKNOWN)])
        source = np.concatenate([source, -1 - np.arange(count)])
    bias = snapshot.model.memory_bias(distance, age, log_weights, types)  # (H, m)
    memory = KeyValueMemory(keys, values, bias=bias)
    return UserMemory(
        memory,
        bias,
        rows,
        source,
        distance,
        age,
        log_weights,
        types,
        user_state,
        snapshot.model.user_query(user_state),
        encoded_rows,
        recent,
        recent_items,
        _transitions(snapshot.model, user_state, recent_items),
        _similarity(snapshot.model, recent_items, liked),
        history,
        at,
        encoded,
    )


def _transitions(model: Recommender, user_state: Tensor, recent_items: Tensor) -> Tensor | None:
    table = model.statistics.transition_counts
    if not model.has_transitions or model.counts_repeats or len(table.items) > _KEPT_PARTS:
        return None
    return _and_zero(model.transition_scores(user_state, 2 * table.sums(recent_items)[None]))


def _similarity(model: Recommender, recent_items: Tensor, liked: Tensor) -> Tensor | None:
    table = model.statistics.similarity
    return None if table is None else _and_zero(table.sums(recent_items, liked))


def _and_zero(part: Tensor) -> Tensor:
    return torch.nn.functional.pad(part, (0, 1))


def user_state_at(model: Recommender, cache: EncoderCache | None, at: int) -> Tensor:
    """Return the user state m_u [dim] at a request's time; zero without events."""
    if cache is None or not len(cache):
        return torch.zeros(model.config.dim)
    newest = cache.timestamps[-1]
    request_time = model.statistics.clamp_request_time(torch.tensor(at), newest)
    return model.user_states(cache.states[-1], newest, request_time)


def target_queries(snapshot: Snapshot, user: UserMemory, targets: Tensor) -> Tensor:
    """Compute the queries [H, T, d] of targets, item rows int64 [T], over a user's memory."""
    return gather_rows(snapshot.tables.queries, targets) + user.query[:, None]


def _profile(snapshot: Snapshot, history: UserHistory) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys, values [p, H, d] and item rows [p] of the profile entries."""
    rows = torch.from_numpy(history.profile_rows.astype(np.int64))
    if not len(rows):
        return None
    keys = _heads_last(snapshot.tables.keys, rows)
    values = _heads_last(snapshot.tables.values, rows)
    if history.profile_content is not None:
        words = rows < 0
        projected = snapshot.projected(history.profile_content)
        keys[words] = projected.keys.transpose(0, 1)[words]
        values[words] = projected.values.transpose(0, 1)[words]
    return keys, values, rows


def _heads_last(table: Tensor, rows: Tensor) -> Tensor:
    """[H, N, d] at rows [m] -> [m, H, d], a copy; row -1 gives anything."""
    return gather_rows(table, rows.clamp(min=0)).transpose(0, 1)
