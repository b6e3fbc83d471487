"""Contributions: how the rows of a memory make up the scores of targets.

After the softmax everything is linear. With α the weights, v the values, and o what a value must
point at to raise the score, the attention part of a score is Σ_h Σ_j α^h_j ⟨v^h_j, o^h⟩: row j
contributes Σ_h α^h_j g^h_j with the gain g^h_j = ⟨v^h_j, o^h⟩. Contributions are signed and exact.
A large weight on a value that does not matter explains nothing.

The transitions λ log(1 + Σ_j f_j) are a sum over the newest events inside a monotone function of
one variable: event j contributes the share f_j / Σ f of it. That is its Aumann-Shapley value, the
gradient along the straight path from no event to all of them. Where there are two such counts, what
followed and what was taken again, each is shared out by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.attend import attend, exclude_self
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_memory import UserMemory, target_queries
from models.recommender.target_attention import gather_rows


class Contributions(NamedTuple):
    """How the m rows of a memory make up the scores of T targets."""

    user: UserMemory
    targets: Tensor  # int64 [T] item rows
    gains: Tensor  # [H, T, m]
    weights: Tensor  # [H, T, m] of the softmax
    each: Tensor  # [T, m] the sum over rows is attention + transitions


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
    each = (weights * gain).sum(0)
    recent = torch.arange(len(user.recent))
    for scale, shares in zip(
        snapshot.model.transition_scale(user.user_state),
        transition_shares(snapshot, user, recent, targets, options),
        strict=False,  # without transitions there are no shares
    ):
        total = shares.sum(1, keepdim=True)
        part = scale * torch.log1p(total) / total.clamp(min=1e-30)  # (T, 1)
        each[:, user.recent[: shares.shape[1]]] += part * shares
    return Contributions(user, targets, gain, weights, each)


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
