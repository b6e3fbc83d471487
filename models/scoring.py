"""A user's memory, the scores of targets that attend over it, and why each score is what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention import attend, context_only
from models.coarse import CoarseIndex
from models.explain import contributions, gains
from models.memory import KeyValueMemory
from models.recommender import ItemTables
from models.retrieval import index_heads, retrieve
from models.snapshot import Snapshot

Mode = Literal["auto", "exact", "coarse"]
Vector = NDArray[np.float32]

_FOREVER = 2**62  # microseconds: an age in the last bucket
# Measured by `heed bench`: with the index at hand, coarse retrieval is faster from 60,000 rows on
# for one target and from 100,000 on for many; and it leaves softmax mass behind.
EXACT_UP_TO = 100_000
DEFAULT_K = 256  # rows that coarse retrieval keeps for each head and target
_CLUSTERED_FROM = 4_096  # rows: fewer are scanned faster than clustered
_TARGET_BLOCK = 1 << 23  # floats of [H, T, n] held at once: 32 MiB


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What the asker did, oldest first, as rows of the catalogue; and the profile beside it."""

    rows: NDArray[np.int32]  # [n] item rows, -1 = an item the catalogue does not know
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    weights: NDArray[np.float32]  # [n] > 0; they enter as + log w
    visible: NDArray[np.bool_] | None = None  # [n], True = may be attended
    vectors: Mapping[int, tuple[Vector | None, Vector | None]] = field(default_factory=dict)
    # event -> its own key and value, of the content space [D]; they stand in for the item's, and
    # where that has none, one stands for both
    profile_rows: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    profile_content: Vector | None = None  # [p, D] for profile entries that are no items

    @classmethod
    def nothing(cls) -> Past:
        """No event and no profile."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class UserMemory:
    """Keys and values of what can be attended, m rows: events, then profile entries."""

    memory: KeyValueMemory  # keys and values [m, H, d]
    bias: Tensor  # [H, m], the memory's: recency + log weight
    rows: Tensor  # int64 [m] item rows, -1 where the row is no item
    source: NDArray[np.int64]  # [m] event of the past; -1 - i is profile entry i
    distance: Tensor  # int64 [m] events between this one and the newest
    age: Tensor  # int64 [m] microseconds at the request
    log_weights: Tensor  # [m]
    summary: Tensor  # [dim] h_u, zero without events

    def __len__(self) -> int:
        return len(self.memory)


@dataclass(frozen=True, slots=True)
class Attending:
    """How a memory is attended.

    `exact` attends over every row; `coarse` over the `k` rows that FAISS finds for each head and
    target; `auto` is exact up to `exact_up_to` rows.
    """

    temperature: float = 1.0  # of the softmax
    hard: bool = False  # the best row of each head instead of the softmax
    exclude_self: bool = False  # a target that is itself in the memory does not see itself
    mode: Mode = "auto"
    k: int | None = None
    probes: int | None = None
    exact_up_to: int = EXACT_UP_TO

    def over(self, rows: int) -> Literal["exact", "coarse"]:
        """What is done over a memory of this many rows."""
        if self.mode == "auto":
            return "exact" if rows <= self.exact_up_to else "coarse"
        return self.mode


SOFTMAX = Attending()


class Scores(NamedTuple):
    """Scores of T targets: total = sequence + attention + prior."""

    total: Tensor  # [T]
    sequence: Tensor  # [T]
    attention: Tensor  # [T]
    prior: Tensor  # [T]
    mass: Tensor  # [T] share of the full softmax that was attended, least of the heads
    within: Tensor | None  # bool [T, H, m]: the rows that coarse retrieval kept; None = all
    mode: Literal["exact", "coarse"]
    memory: int  # rows there were to attend to


class Reason(NamedTuple):
    """What one row did to one target's score."""

    source: int  # event of the past; -1 - i is profile entry i
    weight: float  # mean over heads
    contribution: float  # signed; all rows' sum to the attention part
    without: float  # the score had this row not been there, the attention part recomputed


@torch.inference_mode()
def summarise(snapshot: Snapshot, past: Past) -> Tensor:
    """h_u [dim], the encoder's summary of the newest events that can be seen; zero without any."""
    model = snapshot.model
    source, rows = _attendable(snapshot, past)
    items = rows[rows >= 0][-model.config.window :]
    if model.encoder is None or not len(items):
        return torch.zeros(model.config.dim)
    times = torch.from_numpy(past.timestamps[source])[rows >= 0][-model.config.window :]
    return model.summaries(snapshot.tables.vectors[items][None], times[None])[0, -1]


@torch.inference_mode()
def remember(
    snapshot: Snapshot, past: Past, at: int, *, summary: Tensor | None = None
) -> UserMemory:
    """The memory of a past: what cannot be seen is left out as if it had never happened.

    Args:
        snapshot: whose tables hold the keys and values.
        past: what the asker did.
        at: the request's time, microseconds UTC; an event after it has age 0.
        summary: from `summarise` with the same arguments, where the caller has it.
    """
    tables = snapshot.tables
    source, rows = _attendable(snapshot, past)
    keys = _heads_last(tables.keys, rows)  # (n, H, d)
    values = _heads_last(tables.values, rows)
    own = [(at_row, past.vectors[int(event)]) for at_row, event in enumerate(source)
           if int(event) in past.vectors] if past.vectors else []  # fmt: skip
    for at_row, (key, value) in own:
        row = int(rows[at_row])
        alone = row < 0 or not snapshot.known[row]  # no item to take a missing one from: K = V
        own_key = value if key is None and alone else key
        own_value = key if value is None and alone else value
        if own_key is not None:
            keys[at_row] = _projected(snapshot, own_key).keys[:, 0]
        if own_value is not None:
            values[at_row] = _projected(snapshot, own_value).values[:, 0]
    log_weights = torch.from_numpy(np.log(past.weights[source]))
    times = torch.from_numpy(past.timestamps[source])
    distance = torch.arange(len(source) - 1, -1, -1)
    age = (at - times).clamp(min=0)

    if summary is None:
        summary = summarise(snapshot, past)
    profile = _profile(snapshot, past)
    if profile is not None:
        extra_keys, extra_values, extra_rows = profile
        count = len(extra_rows)
        keys, values = torch.cat([keys, extra_keys]), torch.cat([values, extra_values])
        rows = torch.cat([rows, extra_rows])
        # A profile is timeless: it weighs as the oldest of events do.
        distance = torch.cat([distance, torch.full((count,), _FOREVER)])
        age = torch.cat([age, torch.full((count,), _FOREVER)])
        log_weights = torch.cat([log_weights, torch.zeros(count)])
        source = np.concatenate([source, -1 - np.arange(count)])
    bias = snapshot.model.recency(distance[None], age[None])[:, 0] + log_weights  # (H, m)
    memory = KeyValueMemory(keys, values, bias=bias)
    return UserMemory(memory, bias, rows, source, distance, age, log_weights, summary)


@torch.inference_mode()
def score(
    snapshot: Snapshot,
    user: UserMemory,
    targets: NDArray[np.int32] | NDArray[np.int64],
    how: Attending = SOFTMAX,
    *,
    indexes: Sequence[CoarseIndex] | None = None,
) -> Scores:
    """Score targets, rows [T] of the catalogue, by attending over the user's memory.

    Args:
        snapshot: the model and the catalogue.
        user: from `remember` with the same snapshot.
        targets: item rows [T].
        how: the softmax and how rows are found.
        indexes: one for each head over this memory's keys and bias; built here when missing.
    """
    tables = snapshot.tables
    chosen = torch.from_numpy(np.asarray(targets, dtype=np.int64))
    sequence = tables.vectors[chosen] @ user.summary
    prior = tables.prior[chosen]
    mode = how.over(len(user))
    within = None
    if not len(user) or not len(chosen):
        attention, mass = torch.zeros(len(chosen)), torch.ones(len(chosen))
    elif mode == "coarse":
        attention, mass, within = _attend_coarse(snapshot, user, chosen, how, indexes)
    else:
        step = max(1, _TARGET_BLOCK // (len(user) * user.memory.heads))
        parts = [_attend_exact(snapshot, user, block, how) for block in torch.split(chosen, step)]
        attention, mass = torch.cat(parts), torch.ones(len(chosen))
    total = sequence + attention + prior
    return Scores(total, sequence, attention, prior, mass, within, mode, len(user))


@torch.inference_mode()
def explain(
    snapshot: Snapshot,
    user: UserMemory,
    target: int,
    top: int,
    how: Attending = SOFTMAX,
    *,
    rest: float = 0.0,
    within: Tensor | None = None,
) -> list[Reason]:
    """The `top` rows by size of their contribution to one target's attention part.

    `without` recomputes the attention over what would be left, at the positions the other events
    would then have, so that it equals the score after deleting the event (the sequence part and
    the prior, `rest`, are taken as they are).

    Args:
        snapshot: the model and the catalogue.
        user: from `remember` with the same snapshot.
        target: an item row.
        top: how many rows to name.
        how: as in `score`.
        rest: sequence + prior of the target.
        within: bool [H, m], the rows that coarse retrieval kept; None = all.
    """
    if not len(user) or top < 1:
        return []
    if within is not None:  # what was not kept has no part in it, however long the memory is
        kept = within.any(0).nonzero().flatten()
        user, within = _taken(user, kept), within[:, kept]
    tables = snapshot.tables
    keys = user.memory.keys.transpose(0, 1)  # (H, m, d)
    query = tables.queries[:, target, None]  # (H, 1, d)
    gain = gains(user.memory.values.transpose(0, 1), tables.outputs[:, target])  # (H, m)
    visible = torch.ones(len(user), dtype=torch.bool) if within is None else within
    if how.exclude_self:
        visible = visible & (user.rows != target)
    visible = visible.expand(user.memory.heads, len(user))
    found = attend(
        query, keys, gain[..., None], bias=user.bias[:, None], visible=visible[:, None],
        temperature=how.temperature, hard=how.hard,
    )  # fmt: skip
    weights = found.weights[:, 0]  # (H, m)
    each = contributions(weights, gain)  # (m,)
    order = torch.argsort(each.abs(), descending=True, stable=True)
    order = order[weights.sum(0)[order] > 0][:top]

    step = max(1, _TARGET_BLOCK // (len(user) * user.memory.heads))
    without = [
        each_without
        for block in torch.split(order, step)
        for each_without in _without(snapshot, user, query, gain, visible, block, how).tolist()
    ]
    mean = weights.mean(0)
    return [
        Reason(int(user.source[row]), float(mean[row]), float(each[row]), rest + other)
        for row, other in zip(order.tolist(), without, strict=True)
    ]


def _without(
    snapshot: Snapshot,
    user: UserMemory,
    query: Tensor,
    gain: Tensor,
    visible: Tensor,
    rows: Tensor,
    how: Attending,
) -> Tensor:
    """The attention part [J] without each of the rows [J], the others where they would then be.

    query [H, 1, d], gain [H, m] and visible [H, m] of one target.
    """
    # Deleting event j moves the events before it one place nearer to the present.
    older = user.distance[rows, None] < user.distance  # (J, m)
    nearer = user.distance - (older & (user.distance < _FOREVER)).long()
    shifted = snapshot.model.recency(nearer[:, None], user.age.expand(len(rows), 1, -1))
    left = visible[:, None].expand(len(rows), -1, 1, -1).clone()
    left.scatter_(-1, rows[:, None, None, None].expand(-1, left.shape[1], 1, 1), False)
    return attend(
        query,
        user.memory.keys.transpose(0, 1),
        gain[..., None],
        bias=shifted + user.log_weights,  # (J, H, 1, m)
        visible=left,
        temperature=how.temperature,
        hard=how.hard,
    ).context.sum((1, 2, 3))


def _taken(user: UserMemory, rows: Tensor) -> UserMemory:
    """The memory of these rows alone; their places and ages stay."""
    return UserMemory(
        user.memory.take(rows),
        user.bias[:, rows],
        user.rows[rows],
        user.source[rows.numpy()],
        user.distance[rows],
        user.age[rows],
        user.log_weights[rows],
        user.summary,
    )


def head_indexes(memory: KeyValueMemory) -> tuple[CoarseIndex, ...]:
    """One coarse index for each head of a user's memory, over its keys and its bias."""
    return index_heads(memory, "ivf" if len(memory) > _CLUSTERED_FROM else "flat")


def _attendable(snapshot: Snapshot, past: Past) -> tuple[NDArray[np.int64], Tensor]:
    """The events that can be attended [n], and their item rows int64 [n], -1 for no item."""
    inside = (past.rows >= 0) & (past.rows < len(snapshot.known))
    attendable = np.zeros(len(past.rows), dtype=np.bool_)
    attendable[inside] = snapshot.known[past.rows[inside]]
    for event in past.vectors:
        attendable[event] = True
    if past.visible is not None:
        attendable &= past.visible
    source = np.flatnonzero(attendable)
    return source, torch.from_numpy(np.where(inside, past.rows, -1)[source].astype(np.int64))


def _attend_exact(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    how: Attending,
) -> Tensor:
    """The attention part [T]."""
    tables = snapshot.tables
    query, output = tables.queries[:, targets], tables.outputs[:, targets]  # (H, T, d)
    keys, values = user.memory.keys.transpose(0, 1), user.memory.values.transpose(0, 1)
    bias = user.bias[:, None]  # (H, 1, m)
    visible = targets[:, None] != user.rows if how.exclude_self else None  # (T, m)
    if how.hard:
        context = attend(query, keys, values, bias=bias, visible=visible, hard=True).context
    else:
        context = context_only(
            query, keys, values, bias=bias, visible=visible, temperature=how.temperature
        )
    return (context * output).sum((0, 2))


def _attend_coarse(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    how: Attending,
    indexes: Sequence[CoarseIndex] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention part [T], its mass [T] and the rows that were kept [T, H, m]."""
    tables = snapshot.tables
    k = min(how.k or DEFAULT_K, len(user))
    found = retrieve(
        tables.queries[:, targets].transpose(0, 1),  # (T, H, d)
        user.memory,
        indexes or head_indexes(user.memory),
        k,
        visible=(targets[:, None] != user.rows)[:, None] if how.exclude_self else None,
        temperature=how.temperature,
        hard=how.hard,
        probes=how.probes,
    )
    output = tables.outputs[:, targets].transpose(0, 1)  # (T, H, d)
    rows, mass = cast(Tensor, found.rows), cast(Tensor, found.mass)  # `retrieve` gives both
    kept = torch.zeros(*rows.shape[:2], len(user) + 1, dtype=torch.bool)
    kept.scatter_(2, torch.where(rows < 0, len(user), rows), True)
    return (found.context * output).sum((1, 2)), mass.amin(1), kept[..., :-1]


def _profile(snapshot: Snapshot, past: Past) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys, values [p, H, d] and item rows [p] of the profile entries."""
    rows = torch.from_numpy(past.profile_rows.astype(np.int64))
    if not len(rows):
        return None
    keys = _heads_last(snapshot.tables.keys, rows)
    values = _heads_last(snapshot.tables.values, rows)
    if past.profile_content is not None:
        words = rows < 0
        projected = _projected(snapshot, past.profile_content)
        keys[words] = projected.keys.transpose(0, 1)[words]
        values[words] = projected.values.transpose(0, 1)[words]
    return keys, values, rows


def _projected(snapshot: Snapshot, content: Vector) -> ItemTables:
    """The tables of things that are no items, from their content vectors [D] or [p, D]."""
    vectors = torch.from_numpy(np.atleast_2d(content).astype(np.float32))
    rows = torch.full((len(vectors),), -1)
    return snapshot.model.tables(rows, vectors)


def _heads_last(table: Tensor, rows: Tensor) -> Tensor:
    """[H, N, d] at rows [m] -> [m, H, d], a copy; row -1 gives anything."""
    return table.transpose(0, 1)[rows.clamp(min=0)] if table.shape[1] else table.new_zeros(
        len(rows), table.shape[0], table.shape[2]
    )  # fmt: skip
