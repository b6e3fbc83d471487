"""How long small questions of one key wait beside the largest ones of another key."""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from service.domain.keys import issue_key
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.largest import Largest, questions

COLUMNS = (
    *("question", "answers", "latest, s", "live p99, ms", "most", "score p50, ms", "p99"),
    *("over alone", "not 200"),
)
_PAUSE = 0.01  # seconds between two small requests
_SMALL = Largest(
    "score",
    "POST",
    "/v1/score",
    {"user_id": "light", "item_ids": [f"item-{n}" for n in range(20)], "explain_effects": False},
)
_LIVE = Largest("live", "GET", "/health/live")

Answers = list[tuple[int, float]]  # each status, 0 for a connection that was cut, and its seconds


@dataclass(frozen=True, slots=True)
class Beside:
    """Measurements beside one large question; without it, its answers are missing."""

    name: str
    own: Answers
    live: Answers
    score: Answers

    def row(self, alone: Beside) -> list[str]:
        """The line of a table."""
        statuses = Counter(status for status, _ in self.own)
        p99 = _percentile(self.score, 99)
        return [
            self.name,
            ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items())),
            f"{_percentile(self.own, 100):.2f}" if self.own else "",
            f"{1e3 * _percentile(self.live, 99):.1f}",
            f"{1e3 * _percentile(self.live, 100):.1f}",
            f"{1e3 * _percentile(self.score, 50):.1f}",
            f"{1e3 * p99:.1f}",
            f"{p99 / _percentile(alone.score, 99):.2f}",
            f"{sum(status != 200 for status, _ in self.score)}",
        ]


def issue_keys(data: Path) -> dict[str, str]:
    """Create two keys in the store of a data directory, and return their tokens."""

    async def create() -> dict[str, str]:
        store = SQLiteStore(data / STORE_FILE)
        tokens = {}
        try:
            for name in ("attacker", "other"):
                key, tokens[name] = issue_key(name, frozenset({"read"}), time.time_ns() // 1000)
                await store.add_key(key)
        finally:
            await store.close()
        return tokens

    return asyncio.run(create())


def measure(
    port: int,
    tokens: Mapping[str, str],
    *,
    only: str,
    attackers: int,
    seconds: float,
    progress: Callable[[int, int], None],
) -> Iterator[Beside]:
    """Yield the waits of small questions without large ones, then beside each of them."""
    asked = [None, *(each for each in questions() if only in each.name)]
    for number, question in enumerate(asked):
        progress(number, len(asked))
        loads = [] if question is None else [(question, tokens["attacker"], 0.0)] * attackers
        loads += [(_LIVE, "", _PAUSE), (_SMALL, tokens["other"], _PAUSE)]
        *own, live, score = _run(port, loads, seconds)
        yield Beside(
            "alone" if question is None else question.name,
            [answer for answers in own for answer in answers],
            live,
            score,
        )
    progress(len(asked), len(asked))


def _run(port: int, loads: list[tuple[Largest, str, float]], seconds: float) -> list[Answers]:
    """Send each load from a process of its own, and return the answers to each."""
    context = multiprocessing.get_context("fork")
    until = time.time() + seconds
    queues: list[Queue[Answers]] = [context.Queue() for _ in loads]
    processes = [
        context.Process(target=_send, args=(port, *load, until, queue))
        for load, queue in zip(loads, queues, strict=True)
    ]
    for process in processes:
        process.start()
    found = [queue.get() for queue in queues]
    for process in processes:
        process.join()
    return found


def _send(
    port: int, question: Largest, token: str, pause: float, until: float, out: Queue[Answers]
) -> None:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    body: Any = None if question.body is None else orjson.dumps(question.body)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    answers: Answers = []
    while time.time() < until:
        began = time.perf_counter()
        try:
            connection.request(question.method, question.path, body, headers)
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        answers.append((status, time.perf_counter() - began))
        time.sleep(pause)
    out.put(answers)


def _percentile(answers: Answers, percent: float) -> float:
    return float(np.percentile([seconds for _, seconds in answers], percent))
