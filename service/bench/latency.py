"""Latency of questions over HTTP, beside a bare FastAPI app that answers the same bytes.

A closed loop: each connection asks again when it was answered. What an open-loop load does to the
tail is for `loadtest` to say.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import uvloop

from service.bench.client import Load, closed_loop, connected, post
from service.bench.ground import Ground
from service.bench.processes import Cores, Server, pinned, serving
from service.bench.timing import Spread, Told, ratios, silent
from service.errors import Unavailable

TARGETS = 100
LIMIT = 20
CONCURRENCY = (1, 16)
FLOORS = ("plain", "typed")
_VARIANTS = 16  # requests of one kind with other targets
_PERCENTILES = (50, 95, 99)
_AT = "2030-01-01T00:00:00Z"  # of every request: the same question then has the same answer


@dataclass(frozen=True, slots=True)
class Question:
    """One kind of question, by one user."""

    name: str  # score-200
    ask: str  # score or recommend
    events: int  # of the user's history
    bodies: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured of one question at one concurrency. Servers: heed, plain, typed."""

    question: str
    events: int
    connections: int
    loads: Mapping[str, Sequence[Load]]  # by server, one for each round
    processor: Mapping[str, float | None]  # seconds of the server for each request
    answer_bytes: Mapping[str, int]

    def percentile(self, server: str, percent: int) -> float:
        """Seconds, over all requests of all rounds."""
        return float(
            np.percentile([t for each in self.loads[server] for t in each.latencies], percent)
        )

    def ratio(self, floor: str) -> Spread:
        """Heed's median latency over the floor's, round by round."""
        medians = {
            server: [float(np.median(load.latencies)) for load in self.loads[server]]
            for server in ("heed", floor)
        }
        return ratios(medians["heed"], medians[floor])

    def rate(self, server: str) -> float:
        """Requests answered a second."""
        loads = self.loads[server]
        return sum(len(each.answers) for each in loads) / sum(each.seconds for each in loads)

    @property
    def failed(self) -> int:
        """Requests that were not answered with 200, by any of the servers."""
        return sum(load.failed for loads in self.loads.values() for load in loads)

    def stages(self) -> dict[str, float]:
        """Median seconds that Heed says it spent in each stage, from Server-Timing."""
        seen: dict[str, list[float]] = {}
        for load in self.loads["heed"]:
            for answer in load.answers:
                for part in answer.timing.decode("ascii").split(", "):
                    name, _, milliseconds = part.partition(";dur=")
                    seen.setdefault(name, []).append(float(milliseconds) / 1e3)
        return {name: float(np.median(seconds)) for name, seconds in seen.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "question": self.question,
            "events": self.events,
            "connections": self.connections,
            "requests": sum(len(load.answers) for load in self.loads["heed"]),
            "failed": self.failed,
            "seconds": {
                server: {f"p{p}": self.percentile(server, p) for p in _PERCENTILES}
                for server in self.loads
            },
            "ratio_to_floor": {floor: self.ratio(floor).as_dict() for floor in FLOORS},
            "requests_per_second": {server: self.rate(server) for server in self.loads},
            "processor_seconds": dict(self.processor),
            "answer_bytes": dict(self.answer_bytes),
            "stages": self.stages(),
        }


def questions(ground: Ground, seed: int = 0) -> list[Question]:
    """Score and recommend, for each of the ground's askers."""
    rng = random.Random(seed)
    count = min(TARGETS, len(ground.item_ids))
    found = []
    for user, events in ground.askers:
        scores: list[dict[str, Any]] = [
            {"user_id": user, "at": _AT, "item_ids": rng.sample(ground.item_ids, count)}
            for _ in range(_VARIANTS)
        ]
        found.append(Question(f"score-{events}", "score", events, scores))
        asked: dict[str, Any] = {"user_id": user, "at": _AT, "limit": LIMIT}
        found.append(Question(f"recommend-{events}", "recommend", events, [asked]))
    return found


def measure(
    ground: Ground,
    heed: Server,
    cores: Cores,
    *,
    rounds: int,
    requests: int,
    told: Told = silent,
) -> list[Case]:
    """Ask Heed and the floor in turns.

    Args:
        ground: whose users ask about whose items.
        heed: serves it.
        cores: one for the servers, one for this client.
        rounds: of each question at each concurrency.
        requests: to each server in each round.
        told: how many rounds are done.

    Raises:
        Unavailable: when Heed does not answer, or the floor answers otherwise.
    """
    asked = questions(ground)
    with pinned(cores.client):
        answers = uvloop.run(_answers(heed, asked))
    path = ground.data / "answers.json"
    path.write_bytes(orjson.dumps(answers))
    arguments = ["-m", "service.bench.floor", str(path)]
    with (
        serving(arguments, core=cores.server, environment={}) as floor,
        pinned(cores.client),
    ):
        return uvloop.run(_measure(asked, answers, heed, floor, rounds, requests, told))


# ------------------------------------------------------------------------------ the parts


async def _answers(heed: Server, asked: Sequence[Question]) -> dict[str, dict[str, Any]]:
    """What the floor must answer: what Heed does."""
    found = {}
    async with connected(heed.port, 1) as (connection,):
        for question in asked:
            answer = await connection.ask(post(f"/v1/{question.ask}", question.bodies[0]))
            if answer.status != 200:
                raise Unavailable(
                    f"{question.name} was answered with {answer.status}: {answer.body[:300]!r}"
                )
            found[question.name] = {"ask": question.ask, "answer": answer.json()}
    return found


async def _measure(
    asked: Sequence[Question],
    answers: Mapping[str, Mapping[str, Any]],
    heed: Server,
    floor: Server,
    rounds: int,
    requests: int,
    told: Told,
) -> list[Case]:
    cases: list[Case] = []
    total = len(asked) * len(CONCURRENCY) * rounds
    for question in asked:
        ways = {
            "heed": (heed, f"/v1/{question.ask}"),
            **{name: (floor, f"/{name}/{question.name}") for name in FLOORS},
        }
        made = {
            name: [post(path, body) for body in question.bodies] for name, (_, path) in ways.items()
        }
        sizes = {
            name: await _checked(server, made[name][0], answers[question.name]["answer"])
            for name, (server, _) in ways.items()
        }
        for name, (server, _) in ways.items():
            async with connected(server.port, max(CONCURRENCY)) as connections:
                await closed_loop(connections, made[name])  # to warm up
        for concurrency in CONCURRENCY:
            loads: dict[str, list[Load]] = {name: [] for name in ways}
            used: dict[str, list[float | None]] = {name: [] for name in ways}
            for done in range(rounds):
                told(len(cases) * rounds + done, total)
                for name, (server, _) in ways.items():
                    sent = [made[name][at % len(made[name])] for at in range(requests)]
                    # New each time: the servers hang up on whoever is silent for some seconds.
                    async with connected(server.port, concurrency) as connections:
                        before = server.cpu_seconds()
                        loads[name].append(await closed_loop(connections, sent))
                        used[name].append(_less(server.cpu_seconds(), before))
            each = {name: _mean(seconds, requests) for name, seconds in used.items()}
            cases.append(Case(question.name, question.events, concurrency, loads, each, sizes))
    told(total, total)
    return cases


async def _checked(server: Server, request: bytes, wanted: Any) -> int:
    """Bytes of the answer, which must be the wanted one. Raises `Unavailable`."""
    async with connected(server.port, 1) as (connection,):
        answer = await connection.ask(request)
    if answer.status != 200 or answer.json() != wanted:
        path = request.split(b" ", 2)[1].decode()
        raise Unavailable(f"{path} answered {answer.status}, and not what it was to answer")
    return len(answer.body)


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _mean(seconds: Sequence[float | None], requests: int) -> float | None:
    """Seconds a request, over all rounds."""
    known = [each for each in seconds if each is not None]
    return sum(known) / (len(known) * requests) if known else None
