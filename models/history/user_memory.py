"""A user's memory: keys and values of events and profile entries, the encoder's states, attention.

Near rows are attended one by one, the older events of a long history beside them.
`models.index.memory_attention` attends; here a user, the targets and the request become its memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, exclude_self, gather_rows
from models.attention.partial_softmax import (
    Attended,
    KVBlock,
    PartialSoftmax,
    attend_blocks,
    remove_partial,
)
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import holding
from models.data.windows import window_start
from models.encoder.event_bias import FARTHEST, UNKNOWN, is_liked
from models.encoder.history_encoder import EncoderCache, HistoryEncoder
from models.history.long_history import LISTS_FROM, CollapsedHistory
from models.history.user_history import UserHistory, attendable_events
from models.index.ann_index import IndexKind
from models.index.memory_attention import Indexes, Memory, as_mask, attend, index_heads, retrieve
from models.recommender.recommender import Recommender

_FEW = 2  # events that are appended one by one: of more, torch does all at once in less time


class EncodedHistory(NamedTuple):
    """Encoder states of a history, and their inputs, which tell where encoding can resume."""

    first_item: int  # number of the first event on an item that was read
    events: Tensor  # [n, dim] what was read of them: `Recommender.event_inputs`
    cache: EncoderCache  # with their states and timestamps

    @property
    def nbytes(self) -> int:
        return self.events.nbytes + self.cache.nbytes


def encode(
    snapshot: Snapshot,
    history: UserHistory,
    source: NDArray[np.int64],
    rows: Tensor,
    before: EncodedHistory | None,
) -> EncodedHistory | None:
    """Encode the newest events that can be attended; None without an encoder.

    `source` and `rows` are from `attendable_events`. `before` is from an earlier call with the same
    model: where it read a beginning of the same inputs, only the rest is computed.
    """
    encoder = snapshot.model.encoder
    if encoder is None:
        return None
    on_items = (rows >= 0).numpy()
    if not on_items.all():
        source, rows = source[on_items], rows[torch.from_numpy(on_items)]
    start = window_start(history.before + len(rows), snapshot.model.config.window)
    first = start - history.before
    events = encoder_inputs(snapshot, history, source[first:], rows[first:])
    times = torch.from_numpy(history.timestamps[source[first:]])
    cache, read = None, 0
    if before is not None and before.first_item == start and len(before.events) <= len(events):
        size = len(before.events)
        same = torch.equal(before.cache.timestamps, times[:size])
        if same and torch.equal(before.events, events[:size]):
            cache, read = before.cache, size
    if cache is None:
        cache = encoder.empty_cache()
    if snapshot.stepper is not None and 0 < len(events) - read <= _FEW:
        for event, time in zip(events[read:], times[read:].tolist(), strict=True):
            cache = snapshot.stepper.append(cache, event, time)
    else:
        cache = encoder.append(cache, events[read:], times[read:])
    return EncodedHistory(start, events, cache)


def encoder_inputs(
    snapshot: Snapshot, history: UserHistory, source: NDArray[np.int64], rows: Tensor
) -> Tensor:
    """The encoder's inputs [n, dim] for events on items, by their positions and item rows [n]."""
    vectors = torch.index_select(snapshot.tables.vectors, 0, rows)
    return snapshot.model.event_inputs(vectors, *types_and_log_weights(history, source))


def types_and_log_weights(history: UserHistory, source: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Types int64 and log weights of some events, [n] each."""
    types = torch.from_numpy(history.types[source].astype(np.int64))
    return types, torch.from_numpy(np.log(history.weights[source]))


def without_each(
    encoder: HistoryEncoder, encoded: EncodedHistory, gone: NDArray[np.int64]
) -> list[EncodedHistory]:
    """Return the encoded history without each of the ascending places [G], in one pass."""
    size = len(encoded.events)
    shared = min(int(gone[0]), size - 2)  # so that something follows
    after = torch.arange(shared, size).expand(len(gone), -1)
    after = after[after != torch.from_numpy(gone)[:, None]].view(len(gone), -1)  # (G, n)
    events = encoded.events[after]
    caches = encoder.branch(encoded.cache, shared, events, encoded.cache.timestamps[after])
    return [
        EncodedHistory(encoded.first_item, torch.cat([encoded.events[:shared], own]), cache)
        for own, cache in zip(events, caches, strict=True)
    ]


_KEPT_PARTS = 20_000  # trained items, up to which a memory keeps their transitions: 80 kB
NEWEST_LEFT_OUT = 8  # events; the memory is encoded again without each, to explain scores


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class UserMemory:
    """Keys and values of the rows that can be attended, m of them: events, then profile entries."""

    keys: Tensor  # [m, H, d]
    values: Tensor  # [m, H, d]
    bias: Tensor  # [H, m] recency + log weight + type; -inf = not for this head
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
    # Parts of the scores of all N trained items, which depend only on the user. The last entry, 0,
    # is of the other items, whose row is -1.
    transitions: Tensor | None  # [N + 1]; None where they depend on more, and of many items
    similarity: Tensor | None  # [N + 1]; None without this part
    history: UserHistory  # the history that this was built from
    at: int  # microseconds, the request's time, or one that puts every age in the same bucket
    encoded: EncodedHistory | None  # the states of the newest events; None without an encoder
    collapsed: CollapsedHistory | None = None  # of a long history, the events before these
    collapsed_count: int = 0  # of events in `collapsed` when this was built
    remainder: tuple[float, float] = (0, 0)  # events in a last row that raise a score, lower it
    built: dict[IndexKind, Indexes] = field(default_factory=dict)  # of its rows, once asked for

    def __len__(self) -> int:
        older = 0 if self.collapsed is None else self.collapsed.attendable
        return len(self.keys) + older

    @property
    def block(self) -> KVBlock:
        return KVBlock(self.keys.transpose(0, 1), self.values.transpose(0, 1), self.bias)

    def indexes(self, kind: IndexKind) -> Indexes:
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
            *(self.keys, self.values, self.bias, self.rows, self.distance, self.age),
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

        `dislike` is the model's type of dislikes, or -1.
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

    `at` is the request's time, microseconds UTC; an event after it has age 0. `encoded` is from
    `encode` or an earlier memory. The rows are those after the events in `collapsed`, if given.
    """
    if collapsed is not None:
        count = collapsed.count
        newer = history.newest(count, collapsed.attendable)
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
        itemless = row < 0 or not snapshot.has_vector[row]  # a missing one is the other: K = V
        own_key = value if key is None and itemless else key
        own_value = key if value is None and itemless else value
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
        # Rows that the encoder did not read keep the keys and values of their items.
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
    return UserMemory(
        keys=keys,
        values=values,
        bias=bias,
        rows=rows,
        source=source,
        distance=distance,
        age=age,
        log_weights=log_weights,
        types=types,
        user_state=user_state,
        query=snapshot.model.user_query(user_state),
        encoded_rows=encoded_rows,
        recent=recent,
        recent_items=recent_items,
        transitions=_transitions(snapshot.model, user_state, recent_items),
        similarity=_similarity(snapshot.model, recent_items, liked),
        history=history,
        at=at,
        encoded=encoded,
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
    """The user state m_u [dim] at a request's time; zero without events."""
    if cache is None or not len(cache):
        return torch.zeros(model.config.dim)
    newest = cache.timestamps[-1]
    request_time = model.statistics.clamp_request_time(torch.tensor(at), newest)
    return model.user_states(cache.states[-1], newest, request_time)


def target_queries(snapshot: Snapshot, user: UserMemory, targets: Tensor) -> Tensor:
    """The queries [H, T, d] of targets, item rows int64 [T], over a user's memory."""
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


REMAINDER = -(1 << 62)  # the source of the row that stands for all other older events


def user_memory(user: UserMemory, targets: Tensor, options: AttentionOptions) -> Memory:
    """A user's rows as targets, item rows int64 [T], see them."""
    hides, older = options.exclude_self, user.collapsed
    return Memory(
        user.block._replace(visible=exclude_self(targets, user.rows) if hides else None),
        older,
        older.places(targets) if hides and older is not None else None,
        user.indexes,
    )


def attend_user(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Attended:
    """Attend by targets, item rows int64 [T], over all of a user's rows."""
    query = target_queries(snapshot, user, targets)
    with at_request(user):
        return attend(query, user_memory(user, targets, options), options)


def retrieve_user(
    snapshot: Snapshot, user: UserMemory, targets: Tensor, options: AttentionOptions
) -> Tensor | None:
    """The rows int64 [H, T, k] that targets retrieve; None where the mode is not coarse."""
    if options.mode != "coarse":
        return None
    query = target_queries(snapshot, user, targets)
    with at_request(user):
        return retrieve(query, user_memory(user, targets, options), options)


def is_known(user: UserMemory) -> bool:
    """True if all of a user's rows are few enough to be read one by one."""
    return user.collapsed is None or len(user.collapsed) < LISTS_FROM


def known_rows(user: UserMemory) -> KVBlock:
    """A user's rows, with the older ones behind them if they are few: see `at_request`."""
    if user.collapsed is None or not len(user.collapsed) or not is_known(user):
        return user.block
    parts = zip(user.block[:3], user.collapsed.block()[:3], strict=True)
    return KVBlock(*(torch.cat(pair, 1) for pair in parts))


def at_request(user: UserMemory) -> ExitStack:
    """Hold the older events of a user, if any, as they are at the request's time."""
    held = ExitStack()
    if user.collapsed is not None:
        held.enter_context(holding(user.collapsed.lock))
        user.collapsed.advance_to(user.at)
    return held


def expand_top_events(
    snapshot: Snapshot,
    user: UserMemory,
    target: int,
    top: int,
    whole: PartialSoftmax,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> UserMemory:
    """Add to a memory those older events that matter to one target, as rows of their own.

    All other older events become one row, of their mass and their context, whose source is
    `REMAINDER`: the target attends to the same context as before. Rows that were not retrieved are
    hidden. Twice `top` events are added, since they are chosen by what they add while the others
    keep their weight. `whole` [H, 1] is the target's attention over the whole history, with
    `options`.
    """
    if user.collapsed is None:
        return user
    collapsed, targets = user.collapsed, torch.tensor([target])
    query = target_queries(snapshot, user, targets)  # (H, 1, d)
    outputs = snapshot.tables.outputs[:, target]
    retrieved = retrieve_user(snapshot, user, targets, options)
    near, size = user_memory(user, targets, options).near, len(user.keys)
    seen = None
    with at_request(user):
        history = collapsed.history
        if retrieved is not None:
            mask = as_mask(retrieved, size + len(collapsed))[:, 0]
            near = near._replace(bias=near.bias.masked_fill(~mask[:, :size], -torch.inf))
            seen = mask[:, size:]
        elif options.exclude_self:
            seen = torch.ones(len(query), len(collapsed), dtype=torch.bool)
            own = collapsed.places(targets)
            seen[:, own[own >= 0]] = False
        events, event_bias, others = collapsed.top_events(
            query[:, 0], outputs, whole, 2 * top, seen
        )
        rows = torch.from_numpy(history.rows[events].astype(np.int64))
        biases = torch.from_numpy(event_bias)
        if seen is not None:
            biases = biases.masked_fill(~seen[:, collapsed.places(rows)], -torch.inf)
    keys = gather_rows(snapshot.tables.keys, rows)  # (H, E, d)
    values = gather_rows(snapshot.tables.values, rows)
    # The rest is the part of the softmax that neither the newer nor these events hold.
    named = attend_blocks(query, [near, KVBlock(keys, values, biases)])
    rest = remove_partial(whole, named)
    count = len(events) + 1
    times = torch.from_numpy(history.timestamps[events])
    types = torch.from_numpy(np.append(history.types[events], UNKNOWN).astype(np.int64))
    nothing = torch.zeros(len(keys), 1, keys.shape[2])
    keys, values = torch.cat([keys, nothing], 1), torch.cat([values, rest.context], 1)
    bias = torch.cat([near.bias, biases, rest.logsumexp], 1)
    forever = torch.full((count,), FARTHEST)
    return replace(
        user,
        keys=torch.cat([user.keys, keys.transpose(0, 1)]),
        values=torch.cat([user.values, values.transpose(0, 1)]),
        bias=bias,
        rows=torch.cat([user.rows, rows, torch.tensor([-1])]),
        source=np.concatenate([user.source, events, [REMAINDER]]),
        distance=torch.cat([user.distance, forever]),
        age=torch.cat([user.age, (user.at - times).clamp(min=0), forever[:1]]),
        log_weights=torch.cat([user.log_weights, torch.zeros(count)]),
        types=torch.cat([user.types, types]),
        collapsed=None,
        remainder=others,
        built={},
    )
