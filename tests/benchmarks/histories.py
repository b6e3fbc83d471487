"""Scores and recommendations over HTTP for users of very different numbers of events."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from service.domain.records import Event
from service.domain.timestamps import to_rfc3339
from tests.benchmarks.harness.client import encode_post
from tests.benchmarks.harness.data import AT, FIRST_TIME, LIMIT, TARGETS, YEAR, fill, prepare_data
from tests.benchmarks.harness.options import Data, Requests, Rounds
from tests.benchmarks.harness.servers import Cores, heed, pinned
from tests.benchmarks.harness.tables import print_machine
from tests.benchmarks.harness.turns import Subject, ask_in_turns, print_cases

LENGTHS = (1_000, 10_000, 100_000)
K = 64  # rows that coarse retrieval keeps
_VARIANTS = 16  # requests with other targets


def histories(data: Data = None, rounds: Rounds = 15, requests: Requests = 20) -> None:
    """Measure score and recommend over HTTP for users of a thousand to 100,000 events.

    The events are on the items of the catalogue, a few of which have most of them.
    """
    cores = Cores.choose()
    print_machine(cores)
    with prepare_data(data) as ground:
        fill(ground.data, (), _events(ground.item_ids))
        with heed(ground.data, core=cores.server) as server, pinned(cores.client):
            subjects = [
                Subject(
                    f"{length:,} events",
                    [server],
                    {
                        f"{question}, {mode}": _requests(ground.item_ids, question, mode, length)
                        for question in (f"score {TARGETS}", f"recommend {LIMIT}")
                        for mode in ("auto", f"coarse, {K} rows")
                    },
                )
                for length in LENGTHS
            ]
            cases = ask_in_turns(subjects, connections=[1], rounds=rounds, requests=requests)
    print_cases("Questions by the events of their user", cases)


def _events(item_ids: Sequence[str]) -> Iterator[Event]:
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        rows = (len(item_ids) * rng.random(length) ** 2).astype(np.int64).tolist()
        times = (FIRST_TIME + np.sort(rng.integers(0, YEAR, length))).tolist()
        for row, time in zip(rows, times, strict=True):
            yield Event(f"long-{length}", item_ids[row], timestamp=time)


def _requests(item_ids: Sequence[str], question: str, mode: str, length: int) -> list[bytes]:
    body: dict[str, Any] = {"user_id": f"long-{length}", "at": to_rfc3339(AT)}
    if mode != "auto":
        body["retrieval"] = {"mode": "coarse", "k": K}
    if question.startswith("recommend"):  # the longest history may have every item
        return [encode_post("/v1/recommend", body | {"limit": LIMIT, "exclude_seen": False})]
    rng, count = random.Random(0), min(TARGETS, len(item_ids))
    return [
        encode_post("/v1/score", body | {"item_ids": rng.sample(item_ids, count)})
        for _ in range(_VARIANTS)
    ]
