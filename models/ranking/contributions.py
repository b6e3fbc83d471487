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

All this is in the states that the other events have. The newest event is part of the query as well,
where the closed form fails: of that event it is the loss of the whole model, which needs no state
that is not known. (The encoder's window, which moves in steps, stays where it is.)

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

from models.attention.attend import attend, exclude_self
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.long_history import REMAINDER
from models.history.user_memory import UserMemory, target_queries, user_state_at
from models.ranking.leave_one_out import distance_without
from models.recommender.item_similarity import event_shares
from models.recommender.target_attention import gather_rows

_ALL = 1e-3  # the others' weight, below which a row has all that a head attends


class Contributions(NamedTuple):
    """How the m rows of a memory make up the scores of T targets."""

    user: UserMemory
    targets: Tensor  # int64 [T] item rows
    gains: Tensor  # [H, T, m]
    weights: Tensor  # [H, T, m] of the softmax
    each: Tensor  # [T, m] the sum over rows is the score without the prior


@torch.inference_mode()
def contributions(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    without_newest: Tensor | None = None,
) -> Contributions:
    """Compute what each row of a memory contributes to targets.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot, or from `expand_top_events`.
        targets: item rows, int64 [T].
        options: as in `score`.
        without_newest: [T] the targets' scores but the prior without the newest event that the
            encoder has read; needed of a long history, whose memory here answers one query alone.
    """
    values = user.memory.values.transpose(0, 1)  # (H, m, d)
    gain = gains(values, gather_rows(snapshot.tables.outputs, targets))
    weights = attend(
        target_queries(snapshot, user, targets),
        user.memory.keys.transpose(0, 1),
        values,
        bias=user.bias[:, None],
        visible=exclude_self(targets, user.rows) if options.exclude_self else None,
        temperature=options.temperature,
        hard=options.hard,
    ).weights
    mean = torch.linalg.vecdot(weights, gain)[..., None]  # (H, T, 1)
    is_remainder = torch.from_numpy(user.source == REMAINDER)
    apart = _lost_by_heads(gain, weights, mean, is_remainder)
    each, whole = apart.sum(0), mean.sum(0)  # (T, m), (T, 1)
    recent = torch.arange(len(user.recent))
    shares = transition_shares(snapshot, user, recent, targets, options, beyond=1)
    shares, less = _counts_without(snapshot, shares)  # (S, T, r)
    part = snapshot.model.transition_scores(user.user_state, shares.sum(2))[:, None]  # (T, 1)
    without = _transition_part(snapshot, user.user_state, less)
    each.index_add_(1, user.recent[: shares.shape[2]], part - without)
    whole += part
    similarity = similarity_shares(snapshot, user, recent, targets)
    similarity_lost = similarity
    if similarity.shape[1]:
        _, liked = user.taken(snapshot.model.config.dislike_type)
        # Without one of several events on an item the part stays as it is.
        is_alone = event_shares(user.recent_items[: similarity.shape[1]], liked) == 1
        similarity_lost = similarity * is_alone
        each.index_add_(1, user.recent[: similarity.shape[1]], similarity_lost)
        whole += similarity.sum(1, keepdim=True)
    if user.encoded is not None and len(user.encoded.cache):
        rest = without_newest
        if rest is None:
            cache = user.encoded.cache
            state = user_state_at(snapshot.model, cache.prefix(len(cache) - 1), user.at)
            rest = _attention_without_newest(snapshot, user, state, targets, gain, options)
            rest += similarity.sum(1) - similarity_lost[:, :1].sum(1)
            rest += _transition_part(snapshot, state, less[..., :1]).sum(1)
        each[:, user.encoded_rows[-1]] = whole[:, 0] - rest
    left = whole - each.sum(1, keepdim=True)
    each += left * _equal_shares(user, each, weights, left)
    return Contributions(user, targets, gain, weights, each)


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


def _counts_without(snapshot: Snapshot, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of the events that count, and the counts without each of them, [S, T, r].

    Without an event, older ones take a place nearer to the end: they count more, and the first
    event beyond the depth counts too.

    Args:
        snapshot: the model.
        shares: [S, T, ≤ depth + 1] from `transition_shares`.
    """
    window = snapshot.model.statistics.cooccurrence_window
    counted, beyond = shares[..., : window.depth], shares[..., window.depth :]
    counts = counted.sum(2, keepdim=True) - counted + beyond.sum(2, keepdim=True)
    if len(shares) and window.decay != 1:
        older = shares[0].flip(1).cumsum(1).flip(1)[:, : window.depth] - counted[0]
        counts[0] += older * (1 / window.decay - 1)
    return counted, counts.clamp_(min=0)


def _transition_part(snapshot: Snapshot, user_state: Tensor, counts: Tensor) -> Tensor:
    """Return the transitions part [T, r] of counts [S, T, r]."""
    flat: Tensor = snapshot.model.transition_scores(user_state, counts.flatten(1))
    return flat.view(counts.shape[1:])


def _attention_without_newest(
    snapshot: Snapshot,
    user: UserMemory,
    user_state: Tensor,
    targets: Tensor,
    gain: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Return the attention part [T] without the newest event that the encoder has read.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot, not of a long history.
        user_state: the state of the user without that event.
        targets: item rows, int64 [T].
        gain: [H, T, m] from `gains`.
        options: as in `score`.
    """
    model, newest = snapshot.model, int(user.encoded_rows[-1])
    distance = distance_without(user, newest)
    bias = model.memory_bias(distance, user.age, user.log_weights, user.types)
    bias[:, newest] = -torch.inf
    query = gather_rows(snapshot.tables.queries, targets) + model.user_query(user_state)[:, None]
    weights = attend(
        query,
        user.memory.keys.transpose(0, 1),
        user.memory.values.transpose(0, 1),
        bias=bias[:, None],
        visible=exclude_self(targets, user.rows) if options.exclude_self else None,
        temperature=options.temperature,
        hard=options.hard,
    ).weights
    attended: Tensor = torch.linalg.vecdot(weights, gain).sum(0)
    return attended


def _equal_shares(user: UserMemory, each: Tensor, weights: Tensor, left: Tensor) -> Tensor:
    """Return the share of each row [T, m] in what is left of the scores [T, 1], summing to 1.

    Args:
        user: the memory of m rows.
        each: [T, m] the rows' own parts.
        weights: [H, T, m] of the softmax.
        left: [T, 1] what is shared.
    """
    sharing = (each * left > 0).float()
    is_remainder = user.source == REMAINDER
    if is_remainder.any():
        raising, lowering = user.remainder
        sharing[:, is_remainder] = torch.where(left > 0, float(raising), float(lowering))
    attended = (weights.sum(0) > 0).float()
    sharing = torch.where(sharing.any(1, keepdim=True), sharing, attended)
    return sharing / sharing.sum(1, keepdim=True).clamp(min=1)


def gains(values: Tensor, outputs: Tensor) -> Tensor:
    """Return each row's addend to the score of each target at weight 1: ⟨v^h_j, o^h⟩.

    values [..., H, n, V], outputs [..., H, T, V] -> [..., H, T, n].
    """
    return outputs @ values.mT


def transition_shares(
    snapshot: Snapshot,
    user: UserMemory,
    recent: Tensor,
    targets: Tensor,
    options: AttentionOptions,
    beyond: int = 0,
) -> Tensor:
    """Return what each of the newest events adds to the counts of targets.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        recent: int64 [r], the places in `user.recent` of the events that there are.
        targets: item rows, int64 [T].
        options: as in `score`.
        beyond: further events that would count if the depth were so much larger.

    Returns:
        Tensor: [S, T, ≤ depth + beyond]; S is 0 without transitions.
    """
    model = snapshot.model
    if not model.has_transitions:
        return torch.zeros(0, len(targets), 0)
    items, counts = snapshot.trained_rows[targets], model.statistics.transition_counts
    shares = [2 * counts.shares(user.recent_items[recent], items, beyond)]
    if model.counts_repeats:
        rows, liked = user.taken(model.config.dislike_type)
        again = (rows[recent] == targets[:, None]) & liked[recent] & (not options.exclude_self)
        shares.append(again[:, : counts.window.depth + beyond].float())
    return torch.stack(shares)


def similarity_shares(
    snapshot: Snapshot, user: UserMemory, recent: Tensor, targets: Tensor
) -> Tensor:
    """Return what each of the newest events adds to the similarity part of targets, [T, ≤ depth].

    Arguments as in `transition_shares`. Without the part there are no events.
    """
    similarity = snapshot.model.statistics.similarity
    if similarity is None:
        return torch.zeros(len(targets), 0)
    _, liked = user.taken(snapshot.model.config.dislike_type)
    rows = snapshot.trained_rows[targets]
    return similarity.shares(user.recent_items[recent], liked[recent], rows)
