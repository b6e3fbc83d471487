"""Contributions: how the rows of a memory make up the scores of targets.

With α the weights of a head, v the values, and o what a value must point at to raise the score, the
attention part of a score is Σ_h ḡ^h, where ḡ^h = Σ_j α^h_j g^h_j is the mean of the gains
g^h_j = ⟨v^h_j, o^h⟩. Without row j the others take over its weight, and the head loses

    α_j (g_j - ḡ) / (1 - α_j),

so that a row of mean gain makes no difference, however large its weight. These differences do not
sum to ḡ: most of it is what the rows have in common, and no single row accounts for it. What is
left is shared equally by the rows that raise the score (those that lower it, where it is negative).
Contributions then sum to the score, are ordered as the differences are, and have their signs. Such
a division is the equal allocation of nonseparable contributions of cooperative games (Moulin 1985),
here among the rows whose own part has the sign of what is left. A row with all the weight of a
head contributes ḡ.

The transitions λ log(1 + Σ_j f_j) are a sum over the newest events inside a monotone function of
one variable: event j contributes the share f_j / Σ f of it. That is its Aumann-Shapley value, the
gradient along the straight path from no event to all of them. Where there are two such counts, what
followed and what was taken again, each is shared out by itself. The similarity part is a sum over
the items of the newest events, which the events on one item share equally.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.attend import attend, exclude_self
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.long_history import REMAINDER
from models.history.user_memory import UserMemory, target_queries
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
) -> Contributions:
    """Compute what each row of a memory contributes to targets, item rows int64 [T]."""
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
    mean = torch.linalg.vecdot(weights, gain)[..., None]
    others = 1 - weights
    is_remainder = user.source == REMAINDER
    if is_remainder.any():  # it stands for many rows of a long history, of small weight each
        others.masked_fill_(torch.from_numpy(is_remainder), 1.0)
    apart = (gain - mean).mul_(weights)
    has_all = others <= _ALL
    if bool(has_all.any()):
        apart = torch.where(has_all, weights * gain, apart.div_(others.clamp_(min=_ALL)))
    else:
        apart.div_(others)
    each = apart.sum(0)
    left = mean.sum(0) - each.sum(1, keepdim=True)  # (T, 1)
    recent = torch.arange(len(user.recent))
    for scale, shares in zip(
        snapshot.model.transition_scale(user.user_state),
        transition_shares(snapshot, user, recent, targets, options),
        strict=False,  # without transitions there are no shares
    ):
        total = shares.sum(1, keepdim=True)
        scaled = shares * (scale * torch.log1p(total) / total.clamp(min=1e-30))
        each.index_add_(1, user.recent[: shares.shape[1]], scaled)
    if snapshot.model.statistics.similarity is not None:
        similarity = similarity_shares(snapshot, user, recent, targets)
        each.index_add_(1, user.recent[: similarity.shape[1]], similarity)
    each += left * _equal_shares(user, each, weights, left)
    return Contributions(user, targets, gain, weights, each)


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
) -> Tensor:
    """Return what each of the newest events adds to the counts of targets, [S, T, ≤ depth].

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        recent: int64 [r], the places in `user.recent` of the events that there are.
        targets: item rows, int64 [T].
        options: as in `score`.

    Returns:
        Tensor: S is 0 without transitions.
    """
    model = snapshot.model
    if not model.has_transitions:
        return torch.zeros(0, len(targets), 0)
    items, counts = snapshot.trained_rows[targets], model.statistics.transition_counts
    shares = [2 * counts.shares(user.recent_items[recent], items)]
    if model.counts_repeats:
        rows, liked = user.taken(model.config.dislike_type)
        again = (rows[recent] == targets[:, None]) & liked[recent] & (not options.exclude_self)
        shares.append(again[:, : counts.window.depth].float())
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
