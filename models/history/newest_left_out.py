"""The newest events of a memory left out: what changes without each of them.

These events are read by the encoder last, so that few states depend on them: those of the events
after them and, through the newest state, the user's. Both are encoded anew without each event. They
depend on the user alone, and serve all targets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from models.attention.attend import AttentionOptions, exclude_self
from models.attention.kv_memory import gather_rows
from models.attention.partial_softmax import KVBlock
from models.catalogue.snapshot import Snapshot
from models.encoder.event_bias import FARTHEST
from models.history.encoded_history import without_each
from models.history.user_attention import at_request, user_memory
from models.history.user_memory import NEWEST_LEFT_OUT, UserMemory, user_state_at
from models.index.memory_attention import attend

_LEAST = -1e30  # of a bias that is not -inf
_LEAST_SUM = 1e-20  # of factors that are 1 at most: float32 loses those below 1e-38


class NewestLeftOut(NamedTuple):
    """The K newest events that the encoder has read, newest first, each left out of its memory.

    Without an event, each of the events after it has another state: P pairs of both.
    """

    rows: Tensor  # int64 [K] memory rows
    user_states: Tensor  # [K, dim] m_u without each event
    queries: Tensor  # [K, H, d] of these user states
    pairs: Tensor  # int64 [2, P] places in `rows` of the event left out and of the later one
    changed: KVBlock  # keys, values and biases of the later events, n = P
    bias: Tensor  # [K, H, m] of all other rows, and -inf for these and the event left out

    @property
    def pair_rows(self) -> Tensor:
        """Memory rows of the later events, int64 [P]."""
        return self.rows[self.pairs[1]]


class WithoutNewest(NamedTuple):
    """The attention part of T targets without each of the K newest events."""

    left_out: NewestLeftOut
    attention: Tensor  # [K, T]

    def target(self, number: int) -> WithoutNewest:
        """Return that of one target, T = 1."""
        return WithoutNewest(self.left_out, self.attention[:, number : number + 1])


_KEPT: WeakKeyDictionary[UserMemory, NewestLeftOut] = WeakKeyDictionary()


@torch.inference_mode()
def leave_out_newest(snapshot: Snapshot, user: UserMemory) -> NewestLeftOut | None:
    """Leave out each of the newest events of a memory; None where the encoder has read none.

    The encoder's window, which moves in steps, stays where it is. The result is kept as long as
    the memory.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
    """
    encoder, encoded = snapshot.model.encoder, user.encoded
    if encoder is None or encoded is None or not len(encoded.cache):
        return None
    kept = _KEPT.get(user)
    if kept is not None:
        return kept
    cache, size = encoded.cache, len(encoded.cache)
    count = min(NEWEST_LEFT_OUT, size)
    rows = user.encoded_rows[size - count :].flip(0)
    pairs = torch.tril_indices(count, count, -1)
    if size == 1:
        user_states = user_state_at(snapshot.model, None, user.at)[None]
        changes = cache.states[:0]
    else:
        less = without_each(encoder, encoded, torch.arange(size - count, size).numpy())[::-1]
        # Without event k, newest first, the events before the k-th place are those after it.
        tails = torch.stack([each.cache.states[size - count :] for each in less]).flip(1)
        changes = tails[pairs[0], pairs[1]] - cache.states[size - count :].flip(0)[pairs[1]]
        newest = torch.cat([cache.timestamps[-2:-1], cache.timestamps[-1:].expand(count - 1)])
        at = snapshot.model.statistics.clamp_request_time(torch.tensor(user.at), newest)
        user_states = snapshot.model.user_states(tails[:, 0], newest, at)
    made = _KEPT[user] = _left_out(snapshot, user, rows, user_states, pairs, changes)
    return made


def _left_out(
    snapshot: Snapshot,
    user: UserMemory,
    rows: Tensor,
    user_states: Tensor,
    pairs: Tensor,
    changes: Tensor,
) -> NewestLeftOut:
    """Project user states without each of some events, and changes [P, dim] of later states."""
    model = snapshot.model
    later = rows[pairs[1]]
    keys, values = user.memory.keys[later], user.memory.values[later]  # (P, H, d)
    if model.state_attention is not None:
        keys = keys + model.state_attention.keys(changes)
        values = values + model.state_attention.values(changes)
    distance = distance_without(user, rows)
    bias = model.memory_bias(distance, user.age, user.log_weights, user.types).transpose(0, 1)
    changed = KVBlock(keys.transpose(0, 1), values.transpose(0, 1), bias[pairs[0], :, later].T)
    bias[torch.arange(len(rows)), :, rows] = -torch.inf
    bias[pairs[0], :, later] = -torch.inf
    return NewestLeftOut(rows, user_states, model.user_query(user_states), pairs, changed, bias)


def attention_without_newest(
    snapshot: Snapshot, user: UserMemory, targets: Tensor, options: AttentionOptions
) -> WithoutNewest | None:
    """Compute the attention part of targets without each of the newest events.

    None where the encoder has read none.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        targets: item rows, int64 [T].
        options: as in `score`.
    """
    left_out = leave_out_newest(snapshot, user)
    if left_out is None:
        return None
    attention = None
    if not options.hard and options.mode != "coarse" and user.collapsed is None:
        attention = _by_factors(snapshot, user, left_out, targets, options)
    if attention is None:
        attention = torch.stack([
            _one_by_one(snapshot, user, left_out, place, targets, options)
            for place in range(len(left_out.rows))
        ])  # fmt: skip
    return WithoutNewest(left_out, attention)


def _by_factors(
    snapshot: Snapshot,
    user: UserMemory,
    left_out: NewestLeftOut,
    targets: Tensor,
    options: AttentionOptions,
) -> Tensor | None:
    """Return the attention part [K, T] by products of what depends on the targets or on the user.

    A score is q_t · k_j plus what the user state and the bias add to it, so that e^s is a product
    of two factors, and the sums over rows of K softmaxes are one matrix product. None where all
    products of a softmax may be too small for float32.
    """
    tables, temperature, changed = snapshot.tables, options.temperature, left_out.changed
    query, outputs = (gather_rows(each, targets) for each in (tables.queries, tables.outputs))
    scale = query.shape[2] ** -0.5
    # Of the targets: rows as they are, then those of the pairs.
    keys = torch.cat([user.memory.keys.transpose(0, 1), changed.keys], 1).mT  # (H, d, m + P)
    values = torch.cat([user.memory.values.transpose(0, 1), changed.values], 1).mT
    by_target = (query @ keys).mul_(scale / temperature)  # (H, T, m + P)
    by_target = by_target.sub_(by_target.amax(-1, keepdim=True)).exp_()
    if options.exclude_self:
        rows = torch.cat([user.rows, user.rows[left_out.pair_rows]])
        by_target *= exclude_self(targets, rows)
    # Of the user: a pair counts where its event is left out.
    size, pairs = len(user.memory), left_out.pairs
    by_user = query.new_full((len(left_out.rows), len(query), keys.shape[2]), -torch.inf)
    by_user[..., :size] = left_out.bias
    by_user[pairs[0], :, size + torch.arange(pairs.shape[1])] = changed.bias.T
    by_user += (left_out.queries.transpose(0, 1) @ keys).transpose(0, 1).mul_(scale)
    by_user /= temperature
    by_user = by_user.sub_(by_user.amax(-1, keepdim=True).clamp_(min=_LEAST)).exp_()
    by_user = by_user.permute(1, 2, 0)  # (H, m + P, K)
    sums = by_target @ by_user  # (H, T, K)
    if bool(sums.amin() < _LEAST_SUM):
        return None
    part: Tensor = ((by_target * (outputs @ values)) @ by_user).div_(sums).sum(0).T
    return part


def _one_by_one(
    snapshot: Snapshot,
    user: UserMemory,
    left_out: NewestLeftOut,
    place: int,
    targets: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Return the attention part [T] without one of the events, by attention over all rows."""
    tables, changed = snapshot.tables, left_out.changed
    own = left_out.pairs[0] == place
    later = left_out.pair_rows[own]
    keys, values = (
        each.transpose(0, 1).clone() for each in (user.memory.keys, user.memory.values)
    )  # (H, m, d)
    keys[:, later], values[:, later] = changed.keys[:, own], changed.values[:, own]
    bias = left_out.bias[place].clone()
    bias[:, later] = changed.bias[:, own]
    memory = user_memory(user, targets, options)
    near = KVBlock(keys, values, bias, memory.near.visible)
    query = gather_rows(tables.queries, targets) + left_out.queries[place][:, None]  # (H, T, d)
    with at_request(user):
        context = attend(query, replace(memory, near=near, indexes=None), options).partial.context
    part: Tensor = (context * gather_rows(tables.outputs, targets)).sum((0, 2))
    return part


def distance_without(user: UserMemory, rows: Tensor) -> Tensor:
    """Return the distances [J, m] of a memory without each of its rows [J].

    Older events move a place nearer to the present.
    """
    older = (user.distance > user.distance[rows, None]) & (user.distance < FARTHEST)
    return user.distance - older.long()
