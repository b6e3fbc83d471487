"""Attention over a user's memory: near rows one by one, the older events of a long history beside.

`models.index.memory_attention` attends; here a user, the targets and the request become its memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, exclude_self
from models.attention.kv_memory import KeyValueMemory, gather_rows
from models.attention.partial_softmax import (
    Attended,
    KVBlock,
    PartialSoftmax,
    attend_blocks,
    remove_partial,
)
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import holding
from models.encoder.event_bias import FARTHEST, UNKNOWN
from models.history.long_history import LISTS_FROM
from models.history.user_memory import UserMemory, target_queries
from models.index.memory_attention import Memory, as_mask, attend, retrieve

REMAINDER = -(1 << 62)  # the source of the row that stands for all other older events


def user_memory(user: UserMemory, targets: Tensor, options: AttentionOptions) -> Memory:
    """Return a user's rows as targets, item rows int64 [T], see them."""
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
    """Return the rows int64 [H, T, k] that targets retrieve; None where the mode is not coarse."""
    if options.mode != "coarse":
        return None
    query = target_queries(snapshot, user, targets)
    with at_request(user):
        return retrieve(query, user_memory(user, targets, options), options)


def is_known(user: UserMemory) -> bool:
    """Return whether all of a user's rows are few enough to be read one by one."""
    return user.collapsed is None or len(user.collapsed) < LISTS_FROM


def known_rows(user: UserMemory) -> KVBlock:
    """Return a user's rows, with the older ones behind them if they are few: see `at_request`."""
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
    hidden. Twice as many events are added as are to be named, since they are chosen by what they
    add while the others keep their weight.

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
    collapsed, targets = user.collapsed, torch.tensor([target])
    query = target_queries(snapshot, user, targets)  # (H, 1, d)
    outputs = snapshot.tables.outputs[:, target]
    retrieved = retrieve_user(snapshot, user, targets, options)
    near, size = user_memory(user, targets, options).near, len(user.memory)
    seen = None
    with at_request(user):
        history = collapsed.items.history
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
        built={},
    )
