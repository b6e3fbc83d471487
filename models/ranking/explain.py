"""Explanation of a score: additive contributions of memory rows, and the score without a row.

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

import numpy as np
import torch
from torch import Tensor

from models.attention.attend import attend
from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.encoder.recency_bias import FARTHEST
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.item_weights import rank_contributions
from models.history.long_history import REMAINDER, expand_top_events
from models.history.user_memory import UserMemory

_BLOCK = 1 << 23  # floats of [J, H, m] held at once: 32 MiB


class Reason(NamedTuple):
    """Contribution of one row of the memory to one target's score."""

    source: int  # event of the history; -1 - i is profile entry i
    weight: float  # mean over heads
    contribution: float  # signed; all rows' sum to attention + transitions
    without: float  # the score had this row not been there, attention and transitions recomputed
    # The same with the sequence part: see `models.ranking.leave_one_out`.
    without_exact: float | None = None


@torch.inference_mode()
def explain(
    snapshot: Snapshot,
    user: UserMemory,
    target: int,
    top: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    other_parts: float = 0.0,
    partial: PartialSoftmax | None = None,
) -> list[Reason]:
    """Return the `top` rows that raise one target's attention and transitions most.

    Where fewer rows than that raise them, the rows that lower them most follow. The list is in
    descending order of the signed contributions, so that its head is what a score is due to.

    `without` recomputes both over what would be left, at the positions the other events would then
    have, so that it equals the score after deleting the event (the sequence part and the prior,
    `other_parts`, stay the same).

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        target: an item row.
        top: how many rows to name.
        options: as in `score`.
        other_parts: sequence + prior of the target.
        partial: of a long history, the target's attention as `score` returned it, [H, 1].
    """
    if not len(user) or top < 1:
        return []
    if partial is not None:
        user = expand_top_events(snapshot, user, target, top, partial, options)
    tables = snapshot.tables
    keys = user.memory.keys.transpose(0, 1)  # (H, m, d)
    query = tables.queries[:, target, None]  # (H, 1, d)
    gain = gains(user.memory.values.transpose(0, 1), tables.outputs[:, target])  # (H, m)
    visible = torch.ones(len(user), dtype=torch.bool)
    if options.exclude_self:
        visible = user.rows != target
    found = attend(
        query, keys, gain[..., None], bias=user.bias[:, None], visible=visible,
        temperature=options.temperature, hard=options.hard,
    )  # fmt: skip
    weights = found.weights[:, 0]  # (H, m)
    each = contributions(weights, gain)  # (m,)
    model = snapshot.model
    recent = torch.arange(len(user.recent))
    for number, shares in enumerate(_shares(snapshot, user, recent, target, options)):
        if shares.any():
            part = model.transition_scale(user.user_state)[number] * torch.log1p(shares.sum())
            each[user.recent[: len(shares)]] += part * shares / shares.sum()
    named = ((weights.sum(0) > 0) | (each != 0)).numpy() & (user.source != REMAINDER)
    candidates = torch.from_numpy(np.flatnonzero(named))
    chosen = candidates[torch.from_numpy(rank_contributions(each[candidates].numpy())[:top])]
    order = chosen[torch.argsort(each[chosen], descending=True, stable=True)]

    step = max(1, _BLOCK // (len(user) * user.memory.heads))
    without = [
        each_without
        for block in torch.split(order, step)
        for each_without in (
            _without(snapshot, user, query, gain, visible, block, options)
            + _transitions_without(snapshot, user, target, block, options)
        ).tolist()
    ]
    mean = weights.mean(0)
    return [
        Reason(int(user.source[row]), float(mean[row]), float(each[row]), other_parts + other)
        for row, other in zip(order.tolist(), without, strict=True)
    ]


def gains(values: Tensor, outputs: Tensor) -> Tensor:
    """Return each row's addend to the score at weight 1: ⟨v^h_j, o^h⟩.

    values [..., H, n, V], outputs [..., H, V] -> [..., H, n].
    """
    return (values @ outputs[..., None])[..., 0]


def contributions(weights: Tensor, gains: Tensor) -> Tensor:
    """Return each row's addend, summed over heads: [..., H, n] and [..., H, n] -> [..., n].

    Signed; they sum to the attention part of the score.
    """
    return (weights * gains).sum(-2)


def _without(
    snapshot: Snapshot,
    user: UserMemory,
    query: Tensor,
    gain: Tensor,
    visible: Tensor,
    rows: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Return the attention part [J] without each of the rows [J], the other rows moved up.

    query [H, 1, d], gain [H, m] and visible [m] of one target.
    """
    # Deleting event j moves the events before it one place nearer to the present: their biases
    # change, so that the closed form (o - α_j v_j) / (1 - α_j) would be wrong.
    older = user.distance[rows, None] < user.distance  # (J, m)
    nearer = user.distance - (older & (user.distance < FARTHEST)).long()
    model = snapshot.model
    was = model.memory_bias(user.distance, user.age, user.log_weights, user.types)  # (H, m)
    shifted = model.memory_bias(nearer, user.age, user.log_weights, user.types)  # (H, J, m)
    # The bias of a row that stands for many is not its own: what moves is the difference.
    moves = (shifted - was[:, None]).nan_to_num_(0.0)  # of what is hidden nothing
    shifted = (user.bias[:, None] + moves).transpose(0, 1)[:, :, None]  # (J, H, 1, m)
    left = visible & (torch.arange(len(user)) != rows[:, None])  # (J, m)
    return attend(
        query,
        user.memory.keys.transpose(0, 1),
        gain[..., None],
        bias=shifted,
        visible=left[:, None, None],
        temperature=options.temperature,
        hard=options.hard,
    ).context.sum((1, 2, 3))


def _shares(
    snapshot: Snapshot, user: UserMemory, recent: Tensor, target: int, options: AttentionOptions
) -> Tensor:
    """Return what each of the newest events adds to a target's counts, [S, at most the depth].

    recent: int64 [r], which of `user.recent` there are.
    """
    model = snapshot.model
    if not model.has_transitions:
        return torch.zeros(0, 0)
    item, counts = int(snapshot.trained_rows[target]), model.transition_counts
    shares = [2 * counts.shares(user.recent_items[recent], item)]
    if model.counts_repeats:
        rows, liked = user.taken(model.config.dislike_type)
        again = (rows[recent] == target) & liked[recent] & (not options.exclude_self)
        shares.append(again[: counts.window.depth].float())
    return torch.stack(shares)


def _transitions_without(
    snapshot: Snapshot, user: UserMemory, target: int, rows: Tensor, options: AttentionOptions
) -> Tensor:
    """Return the transitions part [J] without each of the rows [J], older events moved up."""
    if not snapshot.model.has_transitions or not len(rows):
        return torch.zeros(len(rows))
    left = [(user.recent != row).nonzero().flatten() for row in rows]
    counts = [
        _shares(snapshot, user, recent, target, options).sum(1, keepdim=True) for recent in left
    ]
    return snapshot.model.transition_scores(user.user_state, torch.stack(counts))[:, 0]
