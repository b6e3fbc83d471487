"""Shares of the newest events in the counts of transitions and the similarity part of targets."""

from __future__ import annotations

import torch
from torch import Tensor

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from models.recommender.co_occurrence import event_shares


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


def similarity_lost(
    snapshot: Snapshot, user: UserMemory, shares: Tensor, targets: Tensor
) -> Tensor:
    """Return what the similarity part loses without each of the newest events, [T, r].

    Without one of several events on an item the part stays as it is. Without any event, the first
    one beyond the depth counts too, if the others are on other items.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        shares: [T, r] from `similarity_shares` of these targets.
        targets: item rows, int64 [T].
    """
    similarity, size = snapshot.model.statistics.similarity, shares.shape[1]
    if similarity is None or not size:
        return shares
    _, liked = user.taken(snapshot.model.config.dislike_type)
    items, beyond = user.recent_items[:size], user.recent_items[size : size + 1]
    lost = shares * (event_shares(items, liked) == 1)
    if len(beyond) and bool(liked[size]):
        added = similarity.shares(beyond, liked[size:], snapshot.trained_rows[targets])  # (T, 1)
        same = (items == beyond) & liked[:size]
        lost -= added * (same.sum() == same.long())  # none on its item but the event itself
    return lost


def counts_without(snapshot: Snapshot, shares: Tensor) -> tuple[Tensor, Tensor]:
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
