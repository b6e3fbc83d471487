"""Scores and recommendations over HTTP for users of very different numbers of events.

The events of the users that are added are on the items of the catalogue, a few of which have most
of them. One server answers all users in turns, over one connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from service.domain.errors import Unavailable
from service.domain.records import Event
from service.domain.timestamps import to_rfc3339
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.harness.closed_loop import closed_loop, connected
from tests.benchmarks.harness.conditions import serve_data
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, pinned
from tests.benchmarks.harness.tables import ms, ratio, table
from tests.benchmarks.harness.timing import Spread, ratios, spread
from tests.benchmarks.workload.data import BenchmarkData, prepare_data
from tests.benchmarks.workload.many_events import FIRST_TIME, SECONDS
from tests.benchmarks.workload.questions import AT, LIMIT, TARGETS

LENGTHS = (1_000, 10_000, 100_000)
K = 64  # rows that coarse retrieval keeps
_BATCH = 10_000
_VARIANTS = 16  # requests with other targets


@dataclass(frozen=True, slots=True)
class Answered:
    """One question by one user."""

    question: str
    mode: str
    events: int
    seconds: Spread  # medians of the rounds
    ratio: Spread  # times the shortest history's

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def run(
    console: Console, data: Path | None, *, lengths: Sequence[int], rounds: int, requests: int
) -> list[Answered]:
    """Measure, and print what was found.

    Args:
        console: for the table.
        data: a data directory whose store and models are copied; None generates a data set.
        lengths: events of each user, rising.
        rounds: of every question by every user.
        requests: of each in a round.

    Raises:
        Unavailable: when the server does not start, or refuses a request.
    """
    cores = Cores.choose()
    with prepare_data(data) as ground:
        asyncio.run(_add_users(ground, lengths))
        with serve_data(ground, cores) as heed, pinned(cores.client):
            found = asyncio.run(_ask(ground, heed.port, lengths, rounds, requests))
    table(
        console,
        f"Score {TARGETS} and recommend {LIMIT} by events, over HTTP: p50",
        ("question", "retrieval", "events", "ms", f"times {lengths[0]:,} events"),
        (
            (
                each.question,
                each.mode,
                f"{each.events:,}",
                ms(each.seconds.median),
                ratio(each.ratio),
            )
            for each in found
        ),
        left=2,
    )
    return found


async def _add_users(ground: BenchmarkData, lengths: Sequence[int]) -> None:
    store, generator = SQLiteStore(ground.data / STORE_FILE), np.random.default_rng(0)
    try:
        for length in lengths:
            items = (len(ground.item_ids) * generator.random(length) ** 2).astype(np.int64)
            times = FIRST_TIME + np.sort(generator.integers(0, SECONDS, length)) * 1_000_000
            events = [
                Event(f"long-{length}", ground.item_ids[item], timestamp=time)
                for item, time in zip(items.tolist(), times.tolist(), strict=True)
            ]
            for start in range(0, length, _BATCH):
                await store.append(events[start : start + _BATCH])
    finally:
        await store.close()


async def _ask(
    ground: BenchmarkData, port: int, lengths: Sequence[int], rounds: int, requests: int
) -> list[Answered]:
    asked = {
        (question, mode, length): _bodies(ground, question, mode, length)
        for question in ("score", "recommend")
        for mode in ("auto", f"coarse, {K} rows")
        for length in lengths
    }
    samples: dict[tuple[str, str, int], list[float]] = {case: [] for case in asked}
    async with connected(port, 1) as connections:
        for number in range(rounds + 1):  # the first warms up
            for case, bodies in asked.items():
                load = await closed_loop(
                    connections, [bodies[at % len(bodies)] for at in range(requests)]
                )
                if load.failed:
                    raise Unavailable(f"{case}: {load.answers[0].body[:500]!r}")
                if number:
                    samples[case].append(float(np.median(load.latencies)))
    return [
        Answered(
            question, mode, length, spread(own), ratios(own, samples[question, mode, lengths[0]])
        )
        for (question, mode, length), own in samples.items()
    ]


def _bodies(ground: BenchmarkData, question: str, mode: str, length: int) -> list[bytes]:
    body: dict[str, Any] = {"user_id": f"long-{length}", "at": to_rfc3339(AT)}
    if mode != "auto":
        body["retrieval"] = {"mode": "coarse", "k": K}
    if question == "recommend":  # the longest history may have every item
        return [encode_post("/v1/recommend", body | {"limit": LIMIT, "exclude_seen": False})]
    generator = np.random.default_rng(0)
    count = min(TARGETS, len(ground.item_ids))
    return [
        encode_post(
            "/v1/score",
            body | {"item_ids": generator.choice(ground.item_ids, count, replace=False).tolist()},
        )
        for _ in range(_VARIANTS)
    ]
