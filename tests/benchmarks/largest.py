"""How long small questions of one key wait beside the largest ones of another key."""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer

from service.domain.keys import issue_key
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.harness.options import Seconds
from tests.benchmarks.harness.servers import heed
from tests.benchmarks.harness.tables import print_machine, table
from tests.support.largest import Largest, make_data, questions

_PAUSE = 0.01  # seconds between two small requests
_ITEMS = [f"item-{n}" for n in range(20)]
_SMALL = Largest("score", "POST", "/v1/score", {"user_id": "light", "item_ids": _ITEMS})
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


def largest(
    attackers: Annotated[int, typer.Option(min=1, help="Connections of one key.")] = 1,
    only: Annotated[str, typer.Option(help="Questions with this in their names.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="HEED_WORKERS.")] = 1,
    seconds: Seconds = 3.0,
) -> None:
    """Ask the largest questions by one key, beside small ones of another key and liveness.

    The catalogue has 20,000 generated items. The attackers ask as fast as they are answered.
    """
    print_machine("nothing pinned")
    asked = [None, *(each for each in questions() if only in each.name)]
    found: list[Beside] = []
    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
        data = make_data(Path(folder))
        attacker, other = asyncio.run(_issue_keys(data))
        with heed(data, workers=workers, deadline=1) as server:
            for question in asked:
                loads = [] if question is None else [(question, attacker, 0.0)] * attackers
                loads += [(_LIVE, "", _PAUSE), (_SMALL, other, _PAUSE)]
                *own, live, score = _run(server.port, loads, seconds)
                name = "alone" if question is None else question.name
                own_answers = [each for answers in own for each in answers]
                found.append(Beside(name, own_answers, live, score))
    table(
        f"Beside {attackers} of one key, {workers} workers",
        ("question", "answers", "latest, s", "live p99, ms", "most", "score p50, ms", "p99",
         "over alone", "not 200"),
        [each.row(found[0]) for each in found],
    )  # fmt: skip


async def _issue_keys(data: Path) -> list[str]:
    """Create two keys in the store of a data directory, and return their tokens."""
    store, tokens = SQLiteStore(data / STORE_FILE), []
    try:
        for name in ("attacker", "other"):
            key, token = issue_key(name, frozenset({"read"}), time.time_ns() // 1000)
            await store.add_key(key)
            tokens.append(token)
    finally:
        await store.close()
    return tokens


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
