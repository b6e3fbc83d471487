"""Questions to servers that are measured, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from service.domain.timestamps import to_rfc3339
from tests.benchmarks.workload.data import BenchmarkData

TARGETS = 100
LIMIT = 20
AT = 1_893_456_000_000_000  # 2030, of every request: the same question then has the same answer
_VARIANTS = 16  # requests of one kind with other targets
_WORDS = 3  # of a title, that are searched for


@dataclass(frozen=True, slots=True)
class Question:
    """One kind of question, by one user; a search is nobody's."""

    name: str  # score-200
    ask: str  # score, recommend or search
    events: int  # of the user's history
    bodies: Sequence[dict[str, Any]]


def questions(ground: BenchmarkData, seed: int = 0) -> list[Question]:
    """Score and recommend, for each of the ground's askers; search, where items have titles."""
    rng = random.Random(seed)
    count, at = min(TARGETS, len(ground.item_ids)), to_rfc3339(AT)
    found = []
    for user, events in ground.askers:
        scores: list[dict[str, Any]] = [
            {"user_id": user, "at": at, "item_ids": rng.sample(ground.item_ids, count)}
            for _ in range(_VARIANTS)
        ]
        found.append(Question(f"score-{events}", "score", events, scores))
        asked: dict[str, Any] = {"user_id": user, "at": at, "limit": LIMIT}
        found.append(Question(f"recommend-{events}", "recommend", events, [asked]))
    if ground.titles:
        titles = rng.sample(ground.titles, min(_VARIANTS, len(ground.titles)))
        words = [" ".join(title.split()[:_WORDS]) for title in titles]
        found.append(
            Question("search", "search", 0, [{"query": each, "limit": LIMIT} for each in words])
        )
    return found
