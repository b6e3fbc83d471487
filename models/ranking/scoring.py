"""Score targets as a sum of parts: attention over the user's memory, transitions, prior.

A model may have a part for the similarity of the target to the user's items. Boosts of rules are
one more, which `with_boost` adds.

`models.training.losses` forms the same sum when it trains.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import attend, exclude_self
from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.long_history import attend_long, attend_recent, concat_targets
from models.history.user_memory import UserMemory, target_queries
from models.recommender.target_attention import gather_rows

_TARGET_BLOCK = 1 << 23  # floats of [H, T, n] held at once: 32 MiB
_TARGETS = 4_096  # at once: what is gathered of more leaves the cache, measured from 20,000 on


class Scores(NamedTuple):
    """Scores of T targets: total = attention + transitions + similarity + prior + rules."""

    total: Tensor  # [T]
    attention: Tensor  # [T]
    transitions: Tensor  # [T]
    prior: Tensor  # [T]
    mass: Tensor  # [T] share of the softmax that was attended row by row, least of the heads
    mode: Literal["exact", "coarse"]  # coarse: clusters stood for some rows of a long history
    memory_rows: int  # rows of the memory
    # [T] of contexts, relative, at 99 %, largest of heads; None = 0
    relative_error: Tensor | None = None
    # Rows attended one by one, mean of targets and heads; None = all.
    rows_scanned: float | None = None
    partial: PartialSoftmax | None = None  # long history: attention of all heads and targets
    similarity: Tensor | None = None  # [T]; None where the model has no such part
    rules: Tensor | None = None  # [T] boosts; None = 0

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts [T] by name, which add up to the total."""
        parts = {
            "attention": self.attention,
            "transitions": self.transitions,
            "similarity": self.similarity,
            "prior": self.prior,
            "rules": self.rules,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def with_boost(self, boost: NDArray[np.float32]) -> Scores:
        """Return these scores with a boost [T] of each target in the total."""
        rules = torch.from_numpy(boost)
        return self._replace(total=self.total + rules, rules=rules)

    def take(self, order: Tensor) -> Scores:
        """Return the scores of some of the targets."""
        parts: dict[str, Any] = {
            name: part[order] for name, part in self._asdict().items() if isinstance(part, Tensor)
        }
        if self.partial is not None:
            parts["partial"] = PartialSoftmax(*(part[:, order] for part in self.partial))
        return self._replace(**parts)

    def concat(self, more: Scores) -> Scores:
        """Return the scores of these targets and more, of the same memory and boosted alike."""
        parts: dict[str, Any] = {
            name: torch.cat([part, getattr(more, name)])
            for name, part in self._asdict().items()
            if isinstance(part, Tensor)
        }
        if self.partial is not None and more.partial is not None:
            pairs = zip(self.partial, more.partial, strict=True)
            parts["partial"] = PartialSoftmax(*(torch.cat(pair, 1) for pair in pairs))
        if self.rows_scanned is not None and more.rows_scanned is not None:
            own, others = len(self.total), len(more.total)
            scanned = self.rows_scanned * own + more.rows_scanned * others
            parts["rows_scanned"] = scanned / (own + others)
        if more.mode == "coarse":
            parts["mode"] = "coarse"
        return self._replace(**parts)


@torch.inference_mode()
def score(
    snapshot: Snapshot,
    user: UserMemory,
    targets: NDArray[np.int32] | NDArray[np.int64],
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Scores:
    """Score targets, rows [T] of the catalogue, by attending over the user's memory.

    `user` is from `build_memory` with the same snapshot. `options` say, beside the softmax, when
    clusters stand for the older events of a long history.
    """
    if not len(targets):
        none = torch.zeros(0)
        similarity = none if user.similarity is not None else None
        return Scores(none, none, none, none, none, "exact", len(user), similarity=similarity)
    chosen = torch.from_numpy(np.asarray(targets, dtype=np.int64))
    transitions = transition_scores(snapshot, user, chosen, again=not options.exclude_self)
    prior = snapshot.tables.prior.index_select(0, chosen)
    mode: Literal["exact", "coarse"] = "exact"
    error = scanned = whole = None
    if user.collapsed is not None:
        blocks = torch.split(chosen, _TARGETS)
        found = concat_targets(
            attend_long(snapshot, user, user.collapsed, some, options) for some in blocks
        )
        attention, mass, error, looked, whole = found
        mode, scanned = ("coarse" if bool(error.any()) else "exact"), float(looked.mean())
    elif not len(user):
        attention, mass = torch.zeros(len(chosen)), torch.ones(len(chosen))
    else:
        step = min(_TARGETS, max(1, _TARGET_BLOCK // (len(user) * user.memory.heads)))
        parts = [
            _attend_exact(snapshot, user, block, options) for block in torch.split(chosen, step)
        ]
        attention, mass = torch.cat(parts), torch.ones(len(chosen))
    total = attention + transitions + prior
    similarity = similarity_scores(snapshot, user, chosen)
    if similarity is not None:
        total = total + similarity
    return Scores(
        total, attention, transitions, prior, mass, mode, len(user), error, scanned, whole,
        similarity,
    )  # fmt: skip


def similarity_scores(snapshot: Snapshot, user: UserMemory, targets: Tensor) -> Tensor | None:
    """Return the similarity part [T] of targets, item rows int64 [T]; None without the part."""
    if user.similarity is None:
        return None
    return user.similarity[snapshot.trained_rows.index_select(0, targets)]


def transition_scores(
    snapshot: Snapshot, user: UserMemory, targets: Tensor, *, again: bool
) -> Tensor:
    """Return the transitions part [T] of targets. Arguments as in `target_counts`."""
    if user.transitions is not None:
        return user.transitions[snapshot.trained_rows.index_select(0, targets)]
    counts = target_counts(snapshot, user, targets, again=again)
    return snapshot.model.transition_scores(user.user_state, counts)


def target_counts(snapshot: Snapshot, user: UserMemory, targets: Tensor, *, again: bool) -> Tensor:
    """Count what followed the newest items, and repetitions, for each target: [S, T].

    Zero without transitions.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        targets: item rows, int64 [T].
        again: whether earlier events on the target itself count.
    """
    model = snapshot.model
    if not model.has_transitions or not len(user.recent):
        return torch.zeros(1 + model.counts_repeats, len(targets))
    rows = snapshot.trained_rows.index_select(0, targets)
    transitions = model.statistics.transition_counts
    after = transitions.sums(user.recent_items)
    counts = [2 * after[rows.clamp(min=0)] * (rows >= 0)]
    if model.counts_repeats:
        items, liked = user.taken(model.config.dislike_type)
        depth = transitions.window.depth
        items = items[:depth][liked[:depth] & again]
        counts.append(torch.bincount(items, minlength=len(snapshot.catalogue))[targets].float())
    return torch.stack(counts)


def _attend_exact(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Return the attention part [T]."""
    tables = snapshot.tables
    if options.hard:
        context = attend(
            target_queries(snapshot, user, targets),  # (H, T, d)
            user.memory.keys.transpose(0, 1),
            user.memory.values.transpose(0, 1),
            bias=user.bias[:, None],  # (H, 1, m)
            visible=exclude_self(targets, user.rows) if options.exclude_self else None,  # (T, m)
            hard=True,
        ).context
    else:
        context = attend_recent(snapshot, user, targets, options).context
    return (context * gather_rows(tables.outputs, targets)).sum((0, 2))
