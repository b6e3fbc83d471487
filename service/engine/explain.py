"""Reasons of the scores of an answer's items."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import AttentionOptions
from models.history.user_memory import UserMemory
from models.ranking.explain import Effects, Reason, explain
from models.ranking.scoring import Scores
from service.domain.queries import Requester
from service.engine.questions.score import ItemRows


def explain_items(
    snapshot: Snapshot,
    user: UserMemory,
    rows: ItemRows,
    scores: Scores,
    *,
    options: AttentionOptions,
    requester: Requester,
    places: Sequence[int] | None = None,
) -> list[list[Reason]]:
    """Explain the scores of items by the events that contribute most; [] without `explain`.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        rows: item rows [L].
        scores: of these rows, or of more.
        options: as the scores were made.
        requester: says how many reasons of each item, and how exact their effects.
        places: [L] of the rows among the scores, -1 = not scored, which has no reasons; by default
            in order.
    """
    if not requester.explain:
        return []
    where = np.arange(len(rows)) if places is None else np.asarray(places)
    scored = np.flatnonzero(where >= 0)
    partial = scores.partial
    if partial is not None:
        among = torch.from_numpy(where[scored])
        partial = PartialSoftmax(*(part[:, among] for part in partial))
    effects: Effects = "none"
    if requester.explain_effects or requester.explain_exact:
        effects = "exact" if requester.explain_exact else "estimate"
    found = explain(
        snapshot, user, rows[scored], requester.explain, options, partial=partial, effects=effects
    )
    reasons: list[list[Reason]] = [[] for _ in rows]
    for place, each in zip(scored.tolist(), found, strict=True):
        reasons[place] = each
    return reasons
