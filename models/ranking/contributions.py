"""Contributions: how the rows of a memory make up the scores of targets.

With α the weights of a head, v the values, and o what a value must point at to raise the score, the
attention part of a score is Σ_h ḡ^h, where ḡ^h = Σ_j α^h_j g^h_j is the mean of the gains
g^h_j = ⟨v^h_j, o^h⟩. Without row j the others take over its weight, and the head loses

    α_j (g_j - ḡ) / (1 - α_j),

so that a row of mean gain makes no difference, however large its weight. A row with all the weight
of a head contributes ḡ. The transitions λ log(1 + Σ f) lose λ log(1 + Σ f) - λ log(1 + Σ f - f_j)
without event j, and what older events gain by moving nearer; where there are two such counts, what
followed and what was taken again, each loses its own. The similarity part is a sum over the items
of the newest events: it loses the addend of an event that is the only one on its item.

All this is in the states that the other events have. Of the newest eight events that the encoder
has read it is the loss of the whole model instead: the user state, which is part of the query,
depends on these most, and few later events have other states without them. (The encoder's window,
which moves in steps, stays where it is.)

These losses do not sum to the score: most of it is what the rows have in common, and no single row
accounts for it. What is left is shared equally by the rows that raise the score (those that lower
it, where it is negative). Contributions then sum to the score, are ordered as the losses are, and
have their signs. Such a division is the equal allocation of nonseparable contributions of
cooperative games (Moulin 1985), here among the rows whose own part has the sign of what is left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, attend, exclude_self
from models.attention.kv_memory import gather_rows
from models.catalogue.snapshot import Snapshot
from models.history.event_shares import (
    counts_without,
    similarity_lost,
    similarity_shares,
    transition_shares,
)
from models.history.item_weights import WHOLE_SHARE
from models.history.newest_left_out import WithoutNewest, attention_without_newest
from models.history.user_attention import REMAINDER, retrieve_user
from models.history.user_memory import UserMemory, target_queries
from models.index.memory_attention import as_mask

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
    seen: Tensor | None  # bool [H, T, m] or [T, m] rows that are attended; None = all


@torch.inference_mode()
def contributions(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    without: WithoutNewest | None = None,
) -> Contributions:
    """Compute what each row of a memory contributes to targets.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot, or from `expand_top_events`.
        targets: item rows, int64 [T].
        options: as in `score`.
        without: from `attention_without_newest`; needed of a memory from `expand_top_events`, which
            answers one query alone.
    """
    values = user.memory.values.transpose(0, 1)  # (H, m, d)
    gain = gains(values, gather_rows(snapshot.tables.outputs, targets))
    seen = exclude_self(targets, user.rows) if options.exclude_self else None
    retrieved = retrieve_user(snapshot, user, targets, options)
    if retrieved is not None:
        seen = as_mask(retrieved, len(user.memory))
    weights = attend(
        target_queries(snapshot, user, targets),
        user.memory.keys.transpose(0, 1),
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
    recent = torch.arange(len(user.recent))
    shares = transition_shares(snapshot, user, recent, targets, options, beyond=1)
    shares, less = counts_without(snapshot, shares)  # (S, T, r)
    counts = shares.sum(2)
    part = snapshot.model.transition_scores(user.user_state, counts)[:, None]  # (T, 1)
    fewer = _transition_part(snapshot, user.user_state, less)
    counted.index_add_(1, user.recent[: shares.shape[2]], _difference(part, fewer))
    similarity = similarity_shares(snapshot, user, recent, targets)
    lost = similarity_lost(snapshot, user, similarity, targets)
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
        user, targets, gain, weights, each, counted, newest_rows, without_newest, seen
    )


def _difference(whole: Tensor, without: Tensor) -> Tensor:
    """Return what a part loses, exactly 0 where that is rounding: the sign decides who shares."""
    lost = whole - without
    return lost.masked_fill_(lost.abs() < _ROUNDING, 0.0)


def _counted_without(
    snapshot: Snapshot, without: WithoutNewest, counts: Tensor, less: Tensor
) -> Tensor:
    """Return the transitions part without each of the newest events, [K, T].

    Args:
        snapshot: the model and the catalogue.
        without: of these K events.
        counts: [S, T] of all events.
        less: [S, T, r] without each of the newest events, newest first.
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

    Args:
        gain: [H, T, m].
        weights: [H, T, m] of the softmax.
        mean: [H, T, 1] of the gains.
        is_remainder: bool [m]: a row that stands for many of a long history, of small weight each.
    """
    lost = (gain - mean).mul_(weights)
    lost = lost.div_((1 - weights).masked_fill_(is_remainder, 1.0).clamp_(min=_ALL))
    dominant = (weights > 0.5) & ~is_remainder  # at most one row of a head
    if bool(dominant.any()):
        # 1 - α has few digits there, and the sum over the others has all.
        rest = weights.masked_fill(dominant, 0.0)
        others = rest.sum(-1, keepdim=True)
        without = torch.linalg.vecdot(rest, gain)[..., None] / others.clamp(min=_ALL)
        own = torch.where(others <= _ALL, weights * gain, mean - without)
        lost = torch.where(dominant, own, lost)
    return lost


def _transition_part(snapshot: Snapshot, user_state: Tensor, counts: Tensor) -> Tensor:
    """Return the transitions part [T, r] of counts [S, T, r]."""
    flat: Tensor = snapshot.model.transition_scores(user_state, counts.flatten(1))
    return flat.view(counts.shape[1:])


def _equal_shares(user: UserMemory, each: Tensor, weights: Tensor, left: Tensor) -> Tensor:
    """Return the share of each row [T, m] in what is left of the scores [T, 1], summing to 1.

    Args:
        user: the memory of m rows.
        each: [T, m] the rows' own parts.
        weights: [H, T, m] of the softmax.
        left: [T, 1] what is shared.
    """
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
