"""Attention over a long history: its newest events one by one, its older collapsed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.attention.attend import exclude_self
from models.attention.clustered.moment_expansion import ClusteredAttention
from models.attention.kv_memory import KeyValueMemory
from models.attention.partial_softmax import (
    KVBlock,
    PartialSoftmax,
    attend_blocks,
    merge_partials,
    remove_partial,
)
from models.catalogue.snapshot import Snapshot
from models.encoder.event_types import UNKNOWN
from models.encoder.recency_bias import FARTHEST
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.collapsed_history import (
    RECENT_EVENTS,
    CollapsedHistory,
    collapsible_events,
)
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, attendable_events, target_queries
from models.recommender.target_attention import gather_rows

REMAINDER = -(1 << 62)  # the source of the row that stands for all other older events
# Events on items that are attended one by one, at least: positions and transitions count 512.
_LEAST_ON_ITEMS = 3 * RECENT_EVENTS // 4


class LongAttention(NamedTuple):
    """Attention of T targets over a long history.

    attention: [T] the part of the score.
    mass: [T] the share of the softmax that was attended row by row, least of the heads.
    error: [T] of the contexts, relative, at 99 % confidence, largest of the heads.
    scanned: [T] rows attended one by one, mean of the heads.
    partial: of each head, over all rows together.
    """

    attention: Tensor
    mass: Tensor
    error: Tensor
    scanned: Tensor
    partial: PartialSoftmax


def collapsible_prefix(snapshot: Snapshot, history: UserHistory) -> int:
    """Choose how many of a history's oldest events to collapse.

    As many as `collapsible_events`, or fewer, down to none, where most of the newest events are on
    items that cannot be attended.
    """
    events, spare = len(history.rows), 0
    while count := collapsible_events(max(0, events - spare), snapshot.model.config.window):
        if leaves_enough(snapshot, history, count):
            break
        spare = 2 * spare + RECENT_EVENTS
    return count


def leaves_enough(snapshot: Snapshot, history: UserHistory, count: int) -> bool:
    """Return whether all events whose position matters are among those after the first `count`."""
    _, rows = attendable_events(snapshot, history.newest(count, 0))
    window = snapshot.model.config.window
    return int((rows >= 0).sum()) >= max(2 * window, _LEAST_ON_ITEMS)


def concat_targets(parts: Iterable[LongAttention]) -> LongAttention:
    """Concatenate results over targets."""
    attention, mass, error, scanned, partials = zip(*parts, strict=True)
    contexts, logsumexps = zip(*partials, strict=True)
    return LongAttention(
        torch.cat(attention),
        torch.cat(mass),
        torch.cat(error),
        torch.cat(scanned),
        PartialSoftmax(torch.cat(contexts, 1), torch.cat(logsumexps, 1)),
    )


def attend_recent(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> PartialSoftmax:
    """Attend by targets [T] over the rows of a memory itself, without the older events.

    This is the softmax at the options' temperature, even where these ask for the hard one.
    """
    block = KVBlock(
        user.memory.keys.transpose(0, 1),
        user.memory.values.transpose(0, 1),
        user.bias,
        exclude_self(targets, user.rows) if options.exclude_self else None,
    )
    return attend_rows(target_queries(snapshot, user, targets), block, options)


def attend_rows(query: Tensor, block: KVBlock, options: AttentionOptions) -> PartialSoftmax:
    """Attend by queries [H, T, d] over a block of rows, at the options' temperature."""
    if options.temperature == 1:
        return attend_blocks(query, [block])
    biased = block._replace(bias=block.bias / options.temperature)
    return attend_blocks(query / options.temperature, [biased])


def attend_long(
    snapshot: Snapshot,
    user: UserMemory,
    collapsed: CollapsedHistory,
    targets: Tensor,
    options: AttentionOptions,
) -> LongAttention:
    """Attend by targets [T] over the older events and the newer ones.

    Raises:
        ValueError: for another softmax than that at temperature 1, whose sums a collapsed history
            does not hold.
    """
    if options.hard or options.temperature != 1:
        raise ValueError("options: a collapsed history is attended by the softmax at temperature 1")
    outputs = gather_rows(snapshot.tables.outputs, targets)
    recent = attend_recent(snapshot, user, targets, options)
    query = target_queries(snapshot, user, targets)
    found = attend_older(collapsed, query, recent, targets, user.at, options)
    return LongAttention(
        (found.partial.context * outputs).sum((0, 2)),
        (found.exact_logsumexp - found.partial.logsumexp).exp().clamp(max=1.0).amin(0),
        found.error.amax(0),
        found.scanned.mean(0) + len(user.memory),
        found.partial,
    )


def attend_older(
    collapsed: CollapsedHistory,
    query: Tensor,
    recent: PartialSoftmax,
    targets: Tensor,
    at: int,
    options: AttentionOptions,
) -> ClusteredAttention:
    """Attend over the older events of a long history beside its newer ones.

    Args:
        collapsed: the older events.
        query: of the targets, [H, T, d].
        recent: attention of these queries over the newer events.
        targets: item rows, int64 [T].
        at: the request's time, microseconds UTC.
        options: of the attention, at temperature 1.
    """
    use_clusters = options.mode == "coarse" or (
        options.mode == "auto" and len(collapsed) > options.crossover.rows(len(targets))
    )
    with collapsed.lock:
        collapsed.advance_to(at)
        found = collapsed.attend(
            query,
            recent,
            max_error=options.max_error,
            order=options.order,
            use_clusters=use_clusters,
        )
        if options.exclude_self:
            found = collapsed.without_own_item(found, query, targets)
            if bool((found.error > options.max_error).any()):
                found = collapsed.attend(query, recent, use_clusters=False)
                found = collapsed.without_own_item(found, query, targets)
    return found


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
    `REMAINDER`: the target attends to the same context as before. Twice as many events are added
    as are to be named, since they are chosen by what they add while the others keep their weight.

    Args:
        snapshot: the model and the catalogue.
        user: of a long history.
        target: an item row.
        top: how many older events may be named.
        whole: attention of the target over the whole history, [H, 1].
        options: of that attention.
    """
    if user.collapsed is None:
        return user
    collapsed = user.collapsed
    targets = torch.tensor([target])
    query = target_queries(snapshot, user, targets)  # (H, 1, d)
    outputs = snapshot.tables.outputs[:, target]
    with collapsed.lock:
        collapsed.advance_to(user.at)
        history = collapsed.history
        events, event_bias, others = collapsed.top_events(
            query[:, 0], outputs, whole, 2 * top, hidden=target if options.exclude_self else None
        )
    if options.exclude_self:
        seen = history.rows[events] != target
        events, event_bias = events[seen], event_bias[:, seen]
    rows = torch.from_numpy(history.rows[events].astype(np.int64))
    keys = gather_rows(snapshot.tables.keys, rows)  # (H, E, d)
    values = gather_rows(snapshot.tables.values, rows)
    biases = torch.from_numpy(event_bias)
    # What neither the newer nor these events hold is the rest.
    newer = attend_recent(snapshot, user, targets, options)
    named = attend_blocks(query, [KVBlock(keys, values, biases)])
    rest = remove_partial(whole, merge_partials(newer, named))
    count = len(events) + 1
    times = torch.from_numpy(history.timestamps[events])
    types = torch.from_numpy(np.append(history.types[events], UNKNOWN).astype(np.int64))
    nothing = torch.zeros(len(keys), 1, keys.shape[2])
    keys, values = torch.cat([keys, nothing], 1), torch.cat([values, rest.context], 1)
    bias = torch.cat([user.bias, biases, rest.logsumexp], 1)
    memory = KeyValueMemory(
        torch.cat([user.memory.keys, keys.transpose(0, 1)]),
        torch.cat([user.memory.values, values.transpose(0, 1)]),
        bias,
    )
    forever = torch.full((count,), FARTHEST)
    return replace(
        user,
        memory=memory,
        bias=bias,
        rows=torch.cat([user.rows, rows, torch.tensor([-1])]),
        source=np.concatenate([user.source, events, [REMAINDER]]),
        distance=torch.cat([user.distance, forever]),
        age=torch.cat([user.age, (user.at - times).clamp(min=0), forever[:1]]),
        log_weights=torch.cat([user.log_weights, torch.zeros(count)]),
        types=torch.cat([user.types, types]),
        collapsed=None,
        remainder=others,
    )
