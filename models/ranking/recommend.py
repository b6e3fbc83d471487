"""Recommendation: candidates, exact target attention over them, diversity, popularity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot, popular_first
from models.data.row_sets import RowIndices
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_memory import UserMemory
from models.ranking.candidates import candidates
from models.ranking.scoring import Scores, score

# Without an encoder the user's part of the queries is zero, and candidates are no more than near.
# Every item is then scored while targets × rows stay below this: measured by `make bench`, about
# 30 ms on one core.
EXACT_WORK = 2_000_000
# Items that reach the target attention otherwise, at least. Of 600 users of MovieLens 1M the first
# 20 of all items were among 200 candidates by exact inner products; an index has errors of its own.
CANDIDATES = 300
INDEXED_CANDIDATES = 500
_SHARE = 400  # one in so many does: of a million near copies, the best 20 are spread that far


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Recommended items, best first."""

    rows: RowIndices  # [L]
    scores: Scores  # of these rows, in this order
    personal: bool  # False: by popularity, without a memory to attend to
    mode: Literal["exact", "coarse"]  # coarse where any stage was approximate


@torch.inference_mode()
def recommend(
    snapshot: Snapshot,
    user: UserMemory,
    *,
    limit: int,
    allowed: NDArray[np.bool_],
    excluded: RowIndices,
    diversity: float = 0.0,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Ranked:
    """Rank the items of the catalogue for a user.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory`; empty gives the popular items.
        limit: the most items.
        allowed: bool [N], the items that may be returned.
        excluded: item rows that may not be returned, even if allowed.
        diversity: 0 ranks by score alone, 1 by dissimilarity to the items above (MMR).
        options: the softmax and the retrieval of rows; `exact` scores every item.
    """
    allowed = allowed.copy()
    allowed[excluded] = False
    count = int(np.count_nonzero(allowed))
    if not len(user):
        ranked = popular_first(snapshot, np.flatnonzero(allowed))
        rows = ranked[: max(limit, CANDIDATES if diversity else limit)]
    else:
        wanted = candidate_count(snapshot, user, limit, count, options)
        small = snapshot.model.encoder is None and count * _cost(user, options) <= EXACT_WORK
        if options.mode == "exact" or small or count <= wanted:
            rows = np.flatnonzero(allowed)
        else:
            rows = candidates(snapshot, user, allowed, wanted, options)
    exact = not len(user) or len(rows) == count
    scores = score(snapshot, user, rows, options)
    # Without a memory the rows are in order of popularity, from which a trained prior may differ.
    worth = scores.total if len(user) else -torch.arange(len(rows)).float()
    order = torch.argsort(worth, descending=True, stable=True)
    if diversity > 0:
        pool = order[: max(CANDIDATES, 4 * limit)]
        vectors = snapshot.tables.vectors[torch.from_numpy(rows)[pool]]
        order = pool[_diverse(worth[pool], vectors, limit, diversity)]
    order = order[:limit]
    mode = scores.mode if exact else "coarse"
    return Ranked(rows[order.numpy()], _take(scores, order), personal=len(user) > 0, mode=mode)


def candidate_count(
    snapshot: Snapshot,
    user: UserMemory,
    limit: int,
    items: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> int:
    """Return the number of candidates among so many items, bounded by the work of scoring."""
    fewest = CANDIDATES if snapshot.index is None else INDEXED_CANDIDATES
    many = min(items // _SHARE, int(EXACT_WORK / 4 / max(1.0, _cost(user, options))))
    return max(fewest, 4 * limit, many)


def _cost(user: UserMemory, options: AttentionOptions) -> float:
    """Return the cost of attending for one target, in rows."""
    older = 0 if user.collapsed is None else min(len(user.collapsed), options.crossover.many)
    return len(user.memory) + older


def _diverse(worth: Tensor, vectors: Tensor, limit: int, diversity: float) -> Tensor:
    """Choose places in order by maximal marginal relevance (Carbonell & Goldstein 1998).

    Each step takes the largest (1 - λ)·relevance - λ·(largest cosine to a chosen item), relevance
    scaled to [0, 1] so that both terms are of one size.
    """
    if not len(worth):
        return torch.zeros(0, dtype=torch.int64)
    span = (worth.max() - worth.min()).clamp(min=1e-9)
    relevance = (worth - worth.min()) / span
    unit = torch.nn.functional.normalize(vectors, dim=1)
    closest = torch.zeros_like(relevance)
    open_ = torch.ones_like(relevance, dtype=torch.bool)
    taken: list[int] = []
    for _ in range(min(limit, len(worth))):
        value = (1 - diversity) * relevance - diversity * closest
        best = int(value.masked_fill(~open_, -torch.inf).argmax())
        open_[best] = False
        closest = torch.maximum(closest, unit @ unit[best]) if taken else unit @ unit[best]
        taken.append(best)
    return torch.tensor(taken, dtype=torch.int64)


def _take(scores: Scores, order: Tensor) -> Scores:
    """Return the scores of some targets."""
    parts: dict[str, Any] = {
        name: part[order] for name, part in scores._asdict().items() if isinstance(part, Tensor)
    }
    if scores.partial is not None:
        parts["partial"] = PartialSoftmax(*(part[:, order] for part in scores.partial))
    return scores._replace(**parts)
