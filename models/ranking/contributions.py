"""Contributions: how the rows of a memory make up the scores of targets.

With α the weights of a head, v the values, and o what a value must point at to raise the score, the
attention part of a score is Σ_h ḡ^h, where ḡ^h = Σ_j α^h_j g^h_j is the mean of the gains g^h_j =
⟨v^h_j, o^h⟩. Without row j the others have its weight, and the head loses

    α_j (g_j - ḡ) / (1 - α_j),

so that a row of mean gain makes no difference, however large its weight. A row with all the weight
of a head contributes ḡ. The transitions λ log(1 + Σ f) lose λ log(1 + Σ f) - λ log(1 + Σ f - f_j)
without event j, and what older events gain by moving nearer; where there are two such counts, what
followed and what was taken again, each loses its own. The similarity part is a sum over the items
of the newest events: it loses the addend of an event that is the only one on its item.

All this is in the states that the other events have. For the newest eight events that the encoder
has read, it is the loss of the whole model instead: the user state, which is part of the query,
depends on these most, and few later events have other states without them. (The encoder's window,
which moves in steps, stays where it is.)

These losses do not sum to the score: most of it is what the rows have in common, and no single row
accounts for it. The rest is shared equally by the rows that raise the score (those that lower
it, where it is negative). Contributions then sum to the score, are ordered as the losses are, and
have their signs. Such a division is the equal allocation of nonseparable contributions of
cooperative games (Moulin 1985), here among the rows whose own part has the sign of what is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from models.attention.attend import (
    DEFAULT_OPTIONS,
    AttentionOptions,
    attend,
    exclude_self,
    gather_rows,
)
from models.attention.partial_softmax import KVBlock
from models.catalogue.snapshot import Snapshot
from models.encoder.event_bias import FARTHEST
from models.history.long_history import WHOLE_SHARE
from models.history.user_memory import (
    NEWEST_LEFT_OUT,
    REMAINDER,
    UserMemory,
    at_request,
    retrieve_user,
    target_queries,
    user_memory,
    user_state_at,
    without_each,
)
from models.index.memory_attention import as_mask
from models.index.memory_attention import attend as attend_memory
from models.recommender.co_occurrence import event_shares


def transition_shares(
    snapshot: Snapshot, user: UserMemory, targets: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return what each newest event adds to the counts of targets, and these without it, [S, T, r].

    Without an event, older ones take a place nearer to the end: they count more, and the first
    event beyond the depth counts too. S is 0 without transitions.
    """
    model = snapshot.model
    if not model.has_transitions:
        none = torch.zeros(0, len(targets), 0)
        return none, none
    items, transitions = snapshot.trained_rows[targets], model.statistics.transition_counts
    window = transitions.window
    parts = [2 * transitions.shares(user.recent_items, items, 1)]  # one event beyond the depth
    if model.counts_repeats:
        rows, liked = user.taken(model.config.dislike_type)
        again = (rows == targets[:, None]) & liked & (not options.exclude_self)
        parts.append(again[:, : window.depth + 1].float())
    every = torch.stack(parts)  # (S, T, ≤ depth + 1)
    shares, beyond = every[..., : window.depth], every[..., window.depth :]
    counts = shares.sum(2, keepdim=True) - shares + beyond.sum(2, keepdim=True)
    if window.decay != 1:
        older = every[0].flip(1).cumsum(1).flip(1)[:, : window.depth] - shares[0]
        counts[0] += older * (1 / window.decay - 1)
    return shares, counts.clamp_(min=0)


def similarity_shares(
    snapshot: Snapshot, user: UserMemory, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what each newest event adds to the similarity of targets, and what it loses, [T, r].

    Without one of several events on an item the part stays as it is. Without any event, the first
    one beyond the depth counts too, if the others are on other items.
    """
    similarity = snapshot.model.statistics.similarity
    if similarity is None:
        none = torch.zeros(len(targets), 0)
        return none, none
    _, liked = user.taken(snapshot.model.config.dislike_type)
    rows = snapshot.trained_rows[targets]
    shares = similarity.shares(user.recent_items, liked, rows)
    if not (size := shares.shape[1]):
        return shares, shares
    items, beyond = user.recent_items[:size], user.recent_items[size : size + 1]
    lost = shares * (event_shares(items, liked) == 1)
    if len(beyond) and bool(liked[size]):
        added = similarity.shares(beyond, liked[size:], rows)  # (T, 1)
        same = (items == beyond) & liked[:size]
        lost -= added * (same.sum() == same.long())  # none on its item but the event itself
    return shares, lost


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
        return WithoutNewest(self.left_out, self.attention[:, number : number + 1])


_KEPT: WeakKeyDictionary[UserMemory, NewestLeftOut] = WeakKeyDictionary()


@torch.inference_mode()
def leave_out_newest(snapshot: Snapshot, user: UserMemory) -> NewestLeftOut | None:
    """Leave out each of the newest events of a memory; None where the encoder has read none.

    The result is kept as long as the memory.
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
    keys, values = user.keys[later], user.values[later]  # (P, H, d)
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
    """Compute the attention part of targets [T]; None where the encoder has read no event."""
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
    # The factor of the targets: rows as they are, then those of the pairs.
    keys = torch.cat([user.keys.transpose(0, 1), changed.keys], 1).mT  # (H, d, m + P)
    values = torch.cat([user.values.transpose(0, 1), changed.values], 1).mT
    by_target = (query @ keys).mul_(scale / temperature)  # (H, T, m + P)
    by_target = by_target.sub_(by_target.amax(-1, keepdim=True)).exp_()
    if options.exclude_self:
        rows = torch.cat([user.rows, user.rows[left_out.pair_rows]])
        by_target *= exclude_self(targets, rows)
    # The factor of the user: a pair counts if its event is left out.
    size, pairs = len(user.keys), left_out.pairs
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
    chosen = left_out.pairs[0] == place
    later = left_out.pair_rows[chosen]
    keys, values = (each.transpose(0, 1).clone() for each in (user.keys, user.values))  # (H, m, d)
    keys[:, later], values[:, later] = changed.keys[:, chosen], changed.values[:, chosen]
    bias = left_out.bias[place].clone()
    bias[:, later] = changed.bias[:, chosen]
    memory = user_memory(user, targets, options)
    near = KVBlock(keys, values, bias, memory.near.visible)
    query = gather_rows(tables.queries, targets) + left_out.queries[place][:, None]  # (H, T, d)
    with at_request(user):
        attended = attend_memory(query, replace(memory, near=near, indexes=None), options)
    outputs = gather_rows(tables.outputs, targets)
    part: Tensor = (attended.partial.context * outputs).sum((0, 2))
    return part


def distance_without(user: UserMemory, rows: Tensor) -> Tensor:
    """Return the distances [J, m] of a memory without each of its rows [J].

    Older events move a place nearer to the present.
    """
    older = (user.distance > user.distance[rows, None]) & (user.distance < FARTHEST)
    return user.distance - older.long()


_ROUNDING = 1e-5  # a smaller difference of two scores is nothing but rounding
_ALL = 1e-3  # the others' weight, below which a row has all that a head attends


class Contributions(NamedTuple):
    """How the m rows of a memory make up the scores of T targets."""

    user: UserMemory
    targets: Tensor  # int64 [T] item rows
    gains: Tensor  # [H, T, m]
    weights: Tensor  # [H, T, m] of the softmax
    each: Tensor  # [T, m] the sum over rows is the score without the prior
    counted: Tensor  # [T, m] what transitions and similarity lose without each row
    newest_rows: Tensor  # int64 [K] of the newest events that the encoder has read, newest first
    without_newest: Tensor  # [K, T] the scores but the prior without each of these events


@torch.inference_mode()
def contributions(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    without: WithoutNewest | None = None,
) -> Contributions:
    """Compute what each row of a memory contributes to targets, item rows int64 [T].

    A memory from `expand_top_events`, which answers only one query, needs `without` from
    `attention_without_newest`.
    """
    values = user.values.transpose(0, 1)  # (H, m, d)
    gain = gains(values, gather_rows(snapshot.tables.outputs, targets))
    seen = exclude_self(targets, user.rows) if options.exclude_self else None
    retrieved = retrieve_user(snapshot, user, targets, options)
    if retrieved is not None:
        seen = as_mask(retrieved, len(user.keys))
    weights = attend(
        target_queries(snapshot, user, targets),
        user.keys.transpose(0, 1),
        values,
        bias=user.bias[:, None],
        visible=seen,
        temperature=options.temperature,
        hard=options.hard,
    ).weights
    mean = torch.linalg.vecdot(weights, gain)[..., None]  # (H, T, 1)
    is_remainder = torch.from_numpy(user.source == REMAINDER)
    apart = _lost_by_heads(gain, weights, mean, is_remainder)
    each, whole = apart.sum(0), mean.sum(0)  # (T, m), (T, 1)
    counted = torch.zeros_like(each)
    shares, less = transition_shares(snapshot, user, targets, options)  # (S, T, r)
    counts = shares.sum(2)
    part = snapshot.model.transition_scores(user.user_state, counts)[:, None]  # (T, 1)
    fewer = _transition_part(snapshot, user.user_state, less)
    counted.index_add_(1, user.recent[: shares.shape[2]], _difference(part, fewer))
    similarity, lost = similarity_shares(snapshot, user, targets)
    counted.index_add_(1, user.recent[: similarity.shape[1]], lost)
    each += counted
    whole += part + similarity.sum(1, keepdim=True)
    if without is None:
        without = attention_without_newest(snapshot, user, targets, options)
    newest_rows, without_newest = torch.zeros(0, dtype=torch.int64), whole.new_zeros(0, len(each))
    if without is not None:
        newest_rows = without.left_out.rows
        without_newest = without.attention + _counted_without(snapshot, without, counts, less)
        without_newest += similarity.sum(1) - _first_columns(lost, len(newest_rows), 0.0).T
        each[:, newest_rows] = _difference(whole, without_newest.T)
    left = whole - each.sum(1, keepdim=True)
    each += left * _equal_shares(user, each, weights, left)
    return Contributions(
        user=user,
        targets=targets,
        gains=gain,
        weights=weights,
        each=each,
        counted=counted,
        newest_rows=newest_rows,
        without_newest=without_newest,
    )


def _difference(whole: Tensor, without: Tensor) -> Tensor:
    """Return what a part loses, exactly 0 where that is rounding: the sign decides who shares."""
    lost = whole - without
    return lost.masked_fill_(lost.abs() < _ROUNDING, 0.0)


def _counted_without(
    snapshot: Snapshot, without: WithoutNewest, counts: Tensor, less: Tensor
) -> Tensor:
    """Return the transitions part without each of the K newest events, [K, T].

    `counts` are [S, T] of all events, `less` [S, T, r] without each of the newest, newest first.
    """
    user_states = without.left_out.user_states
    if not len(counts):
        return counts.new_zeros(len(user_states), counts.shape[1])
    columns = _first_columns(less, len(user_states), counts[..., None])  # (S, T, K)
    part: Tensor = snapshot.model.transition_scores(user_states, columns.permute(2, 0, 1))
    return part


def _first_columns(columns: Tensor, size: int, other: Tensor | float) -> Tensor:
    """Return the first `size` of the columns [..., r], and `other` in place of those missing."""
    out = columns.new_empty(*columns.shape[:-1], size)
    out[...] = other
    count = min(size, columns.shape[-1])
    out[..., :count] = columns[..., :count]
    return out


def _lost_by_heads(gain: Tensor, weights: Tensor, mean: Tensor, is_remainder: Tensor) -> Tensor:
    """Return what each head loses without each row, [H, T, m], in the states of the other rows.

    Gains and weights are [H, T, m], mean gains [H, T, 1]. The rows of `is_remainder` [m] stand for
    many of a long history, which have small weights.
    """
    lost = (gain - mean).mul_(weights)
    lost = lost.div_((1 - weights).masked_fill_(is_remainder, 1.0).clamp_(min=_ALL))
    dominant = (weights > 0.5) & ~is_remainder  # at most one row of a head
    if bool(dominant.any()):
        # 1 - α has few digits there, and the sum over the others has all.
        rest = weights.masked_fill(dominant, 0.0)
        others = rest.sum(-1, keepdim=True)
        without = torch.linalg.vecdot(rest, gain)[..., None] / others.clamp(min=_ALL)
        of_dominant = torch.where(others <= _ALL, weights * gain, mean - without)
        lost = torch.where(dominant, of_dominant, lost)
    return lost


def _transition_part(snapshot: Snapshot, user_state: Tensor, counts: Tensor) -> Tensor:
    flat: Tensor = snapshot.model.transition_scores(user_state, counts.flatten(1))
    return flat.view(counts.shape[1:])


def _equal_shares(user: UserMemory, each: Tensor, weights: Tensor, left: Tensor) -> Tensor:
    """Return the share of each row [T, m] in the rest of the scores `left` [T, 1], summing to 1."""
    sharing = (each * left.sign() / WHOLE_SHARE).clamp_(0.0, 1.0)
    is_remainder = user.source == REMAINDER
    if is_remainder.any():
        sharing[:, is_remainder] = torch.where(left > 0, *user.remainder)
    attended = (weights.sum(0) > 0).float()
    sharing = torch.where(sharing.any(1, keepdim=True), sharing, attended)
    return sharing / sharing.sum(1, keepdim=True).clamp(min=torch.finfo(sharing.dtype).tiny)


def gains(values: Tensor, outputs: Tensor) -> Tensor:
    """Return each row's addend to the score of each target at weight 1: ⟨v^h_j, o^h⟩.

    values [..., H, n, V], outputs [..., H, T, V] -> [..., H, T, n].
    """
    return outputs @ values.mT
