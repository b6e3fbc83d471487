"""Score targets as a sum of parts: attention over the user's memory, transitions, prior.

A model may have a part for the similarity of the target to the user's items. Boosts of rules are
one more, which `with_boost` adds.

`models.training.losses` forms the same sum when it trains.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, Retrieved, gather_rows
from models.attention.partial_softmax import Attended, PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, attend_user

_TARGET_BLOCK = 1 << 23  # floats of [H, T, n] held at once: 32 MiB
_TARGETS = 4_096  # at once: what is gathered of more leaves the cache, measured from 20,000 on


class Scores(NamedTuple):
    """Scores of T targets: total = attention + transitions + similarity + prior + rules."""

    total: Tensor  # [T]
    attention: Tensor  # [T]
    transitions: Tensor  # [T]
    prior: Tensor  # [T]
    mass: Tensor  # [T] share of the softmax that was attended row by row, least of the heads
    mode: Retrieved  # how the memory was attended
    memory_rows: int  # rows of the memory
    # [T] of contexts, relative, at 99 %, largest of heads; None = 0
    relative_error: Tensor | None = None
    rows_scanned: float = 0.0  # rows attended one by one, mean of targets and heads
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

    @property
    def personal(self) -> Tensor:
        """The part of each total [T] that a memory makes up, the sum of contributions."""
        personal = self.attention + self.transitions
        return personal if self.similarity is None else personal + self.similarity

    def with_boost(self, boost: NDArray[np.float32]) -> Scores:
        """Return these scores with a boost [T] of each target in the total."""
        rules = torch.from_numpy(boost)
        return self._replace(total=self.total + rules, rules=rules)

    def take(self, order: Tensor) -> Scores:
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
            if isinstance(part, Tensor) and name != "relative_error"
        }
        both = self, more
        if any(scores.relative_error is not None for scores in both):  # the others are exact
            errors = (x.total * 0 if x.relative_error is None else x.relative_error for x in both)
            parts["relative_error"] = torch.cat([*errors])
        if self.partial is not None and more.partial is not None:
            pairs = zip(self.partial, more.partial, strict=True)
            parts["partial"] = PartialSoftmax(*(torch.cat(pair, 1) for pair in pairs))
        size, others = len(self.total), len(more.total)
        scanned = self.rows_scanned * size + more.rows_scanned * others
        mode = self.mode if others == 0 or more.mode == "exact" else more.mode
        return self._replace(rows_scanned=scanned / max(1, size + others), mode=mode, **parts)


@torch.inference_mode()
def score(
    snapshot: Snapshot,
    user: UserMemory,
    targets: NDArray[np.int32] | NDArray[np.int64],
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Scores:
    """Score targets, rows [T] of the catalogue, by attending over the user's memory."""
    chosen = torch.from_numpy(np.asarray(targets, dtype=np.int64))
    transitions = transition_scores(snapshot, user, chosen, again=not options.exclude_self)
    prior = snapshot.tables.prior.index_select(0, chosen)
    attention, mass = torch.zeros(len(chosen)), torch.ones(len(chosen))
    mode: Retrieved = "exact"
    error = whole = None
    scanned = 0.0
    if len(user) and len(chosen):
        rows = 1 if user.collapsed is not None else len(user)
        step = min(_TARGETS, max(1, _TARGET_BLOCK // (rows * user.keys.shape[1])))
        blocks = [chosen] if len(chosen) <= step else torch.split(chosen, step)
        parts = [attend_user(snapshot, user, block, options) for block in blocks]
        sums = [
            (each.partial.context * gather_rows(snapshot.tables.outputs, block)).sum((0, 2))
            for each, block in zip(parts, blocks, strict=True)
        ]
        attention = sums[0] if len(sums) == 1 else torch.cat(sums)
        if user.collapsed is None and options.mode != "coarse":
            scanned = float(len(user))
        else:
            attended = Attended.concat(parts)
            mass, scanned = attended.mass.amin(0), float(attended.scanned.mean())
            whole = None if user.collapsed is None else attended.partial
            if options.mode == "coarse":
                mode = "coarse"
            elif bool(attended.error.any()):
                mode, error = "lists", attended.error.amax(0)
    total = attention + transitions + prior
    similarity = similarity_scores(snapshot, user, chosen)
    if similarity is not None:
        total = total + similarity
    return Scores(
        total=total,
        attention=attention,
        transitions=transitions,
        prior=prior,
        mass=mass,
        mode=mode,
        memory_rows=len(user),
        relative_error=error,
        rows_scanned=scanned,
        partial=whole,
        similarity=similarity,
    )


def similarity_scores(snapshot: Snapshot, user: UserMemory, targets: Tensor) -> Tensor | None:
    """Return the similarity part [T] of targets, item rows int64 [T]; None without the part."""
    if user.similarity is None:
        return None
    return user.similarity[snapshot.trained_rows.index_select(0, targets)]


def transition_scores(
    snapshot: Snapshot, user: UserMemory, targets: Tensor, *, again: bool
) -> Tensor:
    if user.transitions is not None:
        return user.transitions[snapshot.trained_rows.index_select(0, targets)]
    counts = target_counts(snapshot, user, targets, again=again)
    return snapshot.model.transition_scores(user.user_state, counts)


def target_counts(snapshot: Snapshot, user: UserMemory, targets: Tensor, *, again: bool) -> Tensor:
    """Count what followed the newest items, and repetitions, for each target: [S, T].

    With `again`, earlier events on the target itself count.
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
