"""The job: the same questions in this process, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from models.attention.attend import DEFAULT_OPTIONS
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.recommend import recommend
from models.ranking.scoring import score
from service.engine.search import search_items
from tests.benchmarks.workload.data import BenchmarkData
from tests.benchmarks.workload.loaded import LoadedData, LoadedUser
from tests.benchmarks.workload.questions import AT, Question
from tests.support import asking

Job = Callable[[], object]


def jobs(
    ground: BenchmarkData, subjects: LoadedData, asked: Sequence[Question]
) -> dict[str, list[Job]]:
    """One job for each body of each question, by the question's name.

    Scores and recommendations are of a memory that is in place; a search reads its words, and finds
    their vector where it was encoded before, as the service does.
    """
    users = dict(zip((user for user, _ in ground.askers), subjects.users, strict=False))
    return {
        question.name: [_job(subjects, users, question.ask, body) for body in question.bodies]
        for question in asked
    }


def timed(works: Sequence[Job], times: int) -> list[float]:
    """Seconds of each of so many calls, of one job after the other."""
    found = []
    for number in range(times):
        started = time.perf_counter()
        works[number % len(works)]()
        found.append(time.perf_counter() - started)
    return found


# ------------------------------------------------------------------------------ the parts


def _job(
    subjects: LoadedData, users: Mapping[str, LoadedUser], ask: str, body: Mapping[str, Any]
) -> Job:
    snapshot = subjects.snapshot
    offered = snapshot.catalogue.servable
    if ask == "search":
        query = asking.search(asking.who(), body["query"], body["limit"])
        nobody = build_memory(snapshot, UserHistory.empty(), AT)
        return lambda: search_items(
            query,
            snapshot,
            nobody,
            subjects.embeddings.query,
            allowed=offered,
            options=DEFAULT_OPTIONS,
        )
    user = users[body["user_id"]]
    if ask == "recommend":
        limit, seen = body["limit"], user.events.items
        return lambda: recommend(snapshot, user.memory, limit=limit, allowed=offered, excluded=seen)
    targets = snapshot.catalogue.rows(body["item_ids"])
    return lambda: score(snapshot, user.memory, targets)
