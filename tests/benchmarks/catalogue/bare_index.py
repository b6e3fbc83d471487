"""The bare index of items: its candidates, and their recall of the exact best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from models.ranking.recommend import (
    RERANKED,
    candidate_count,
    coarse_query,
    gathered_count,
    recommend,
)
from tests.benchmarks.harness.timing import ProgressCallback
from tests.benchmarks.workload.questions import LIMIT

_SHARE = 4  # of the catalogue: an index asked for more of it than 1 in so many is none


@dataclass(frozen=True, slots=True)
class Recalls:
    """Recall of the best items of users, had every item been scored."""

    users: int  # that these are a mean of
    answers: float
    index: float  # among as many candidates from the bare index as recommending asks for
    times: int  # as many candidates, of which the index has what answers have
    index_times: float  # what it has among these: less than the answers, where none would do


@torch.inference_mode()
def nearest(snapshot: Snapshot, user: UserMemory, times: int = 1) -> NDArray[np.int64]:
    """So many times as many candidates as recommending asks the bare index for, best first."""
    if snapshot.index is None:
        raise ValueError("so few items have no index")
    count = times * wanted(snapshot, user)
    rows: NDArray[np.int64] = snapshot.index.search(
        coarse_query(snapshot, user).readout[None].numpy(), count, probes=RERANKED * count
    )[0]
    return rows


def wanted(snapshot: Snapshot, user: UserMemory) -> int:
    """Return the number of items that recommending takes from the index."""
    items = len(snapshot.catalogue)
    return gathered_count(items, candidate_count(snapshot, user, LIMIT, items))


def judged(
    snapshot: Snapshot,
    memories: Sequence[UserMemory],
    answers: Sequence[Sequence[str]],
    progress: ProgressCallback,
) -> Recalls:
    """Look for the best of users, had every item been scored, in answers and in the index.

    Args:
        snapshot: with an index.
        memories: of the users.
        answers: the items that each was recommended.
        progress: called with the number of users that are done.
    """
    best, found = [], []
    for number, (memory, answer) in enumerate(zip(memories, answers, strict=True)):
        progress(number, len(memories))
        best.append(_best(snapshot, memory))
        names = set(snapshot.catalogue.vocabulary.ids_of(best[-1].tolist()))
        found.append(len(names.intersection(answer)) / len(names))
    progress(len(memories), len(memories))
    answered = float(np.mean(found))

    def recall(times: int) -> float:
        return float(
            np.mean(
                [
                    np.isin(rows, nearest(snapshot, memory, times)).mean()
                    for rows, memory in zip(best, memories, strict=True)
                ]
            )
        )

    most = len(snapshot.catalogue) // _SHARE // max(wanted(snapshot, each) for each in memories)
    times, index = 1, recall(1)
    reached = index
    while reached < answered and 2 * times <= most:
        times *= 2
        reached = recall(times)
    return Recalls(len(memories), answered, index, times, reached)


def _best(snapshot: Snapshot, user: UserMemory) -> NDArray[np.integer]:
    """The best unseen items, every one scored."""
    seen = np.unique(user.history.rows[user.history.rows >= 0]).astype(np.int64)
    return recommend(
        snapshot,
        user,
        limit=LIMIT,
        allowed=snapshot.has_vector,
        excluded=seen,
        options=AttentionOptions(mode="exact"),
    ).rows
