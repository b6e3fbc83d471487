"""Requests over HTTP, beside a bare FastAPI app that answers the same bytes, and beside the job.

A closed loop: each connection asks again when it was answered. What an open-loop load does to the
tail is for `loadtest` to say.

What the service adds to a job is its time for a request over the time of the bare app and of the
job alone together. With c connections that never rest, a request takes its latency / c of the
server's time (Little's law, L = λW: https://doi.org/10.1287/opre.9.3.383).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop

from service.domain.errors import Unavailable
from tests.benchmarks.harness.closed_loop import Load, closed_loop, connected
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, pinned, serving
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, ratios
from tests.benchmarks.workload.in_process import Job, timed
from tests.benchmarks.workload.questions import Question

CONCURRENCY = (1, 16)
FLOORS = ("plain", "typed")
WORKING = "working"  # the typed floor that does the job too
NOTHING: Mapping[str, str] = {}
_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Case:
    """Loads of one question at one concurrency, by server: heed, plain, typed."""

    question: str
    events: int
    connections: int
    loads: Mapping[str, Sequence[Load]]  # by server, one for each round; `WORKING` may be missing
    alone: Sequence[float]  # median seconds of the job in this process, for each round
    processor: Mapping[str, float | None]  # seconds of the server for each request
    answer_bytes: Mapping[str, int]

    def percentile(self, server: str, percent: int) -> float:
        """Seconds, over all requests of all rounds."""
        return float(
            np.percentile([t for each in self.loads[server] for t in each.latencies], percent)
        )

    def ratio(self, floor: str) -> Spread:
        """Heed's median latency over the floor's, round by round."""
        return ratios(self._medians("heed"), self._medians(floor))

    def added(self, floor: str) -> Spread:
        """Heed's time for a request over the floor's and the job's together, round by round."""
        together = [
            floors / self.connections + alone
            for floors, alone in zip(self._medians(floor), self.alone, strict=True)
        ]
        return ratios([each / self.connections for each in self._medians("heed")], together)

    def over(self, floor: str) -> Spread:
        """Heed's latency without the floor's, over the job's, round by round."""
        pairs = zip(self._medians("heed"), self._medians(floor), strict=True)
        return ratios([heed - floors for heed, floors in pairs], self.alone)

    def _medians(self, server: str) -> list[float]:
        """Seconds of a request in each round."""
        return [float(np.median(load.latencies)) for load in self.loads[server]]

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
                for part in answer.server_timing.decode("ascii").split(", "):
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
            "job_seconds": float(np.median(self.alone)),
            "ratio_to_floor_and_job": {floor: self.added(floor).as_dict() for floor in FLOORS},
            "ratio_to_working_floor": (
                self.ratio(WORKING).as_dict() if WORKING in self.loads else None
            ),
            "requests_per_second": {server: self.rate(server) for server in self.loads},
            "processor_seconds": dict(self.processor),
            "answer_bytes": dict(self.answer_bytes),
            "stages": self.stages(),
        }


def measure(
    asked: Sequence[Question],
    works: Mapping[str, Sequence[Job]],
    heed: Server,
    cores: Cores,
    *,
    rounds: int,
    requests: int,
    concurrency: Sequence[int] = CONCURRENCY,
    progress: ProgressCallback = no_progress,
    working: Path | None = None,
    environment: Mapping[str, str] = NOTHING,
) -> list[Case]:
    """Ask Heed and the floor in turns, and do the job alone.

    Args:
        asked: the questions.
        works: by question, what is timed in this process beside it.
        heed: answers them.
        cores: one for the servers and the job, one for this client.
        rounds: of each question at each concurrency.
        requests: to each server in each round, and how often the job is done.
        concurrency: connections, one number after the other.
        progress: called with the number of rounds that are done.
        working: the data directory of the questions, for a floor that does the job; None = without.
        environment: of that floor, its HEED_* variables.

    Raises:
        Unavailable: when Heed does not answer, or the floor answers otherwise.
    """
    with pinned(cores.client):
        answers = uvloop.run(_answers(heed, asked))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(orjson.dumps(answers))
        file.flush()
        arguments = ["-m", "tests.benchmarks.http.floor", file.name]
        with ExitStack() as stack:
            floor = stack.enter_context(serving(arguments, core=cores.server, environment={}))
            servers = {"heed": heed, "floor": floor}
            if working is not None:
                arguments = [*arguments, str(working)]
                servers[WORKING] = stack.enter_context(
                    serving(arguments, core=cores.server, environment=environment)
                )
            stack.enter_context(pinned(cores.client))
            run = _Run(servers, works, cores.server, rounds, requests)
            return uvloop.run(run.measure(asked, answers, concurrency, progress))


# ------------------------------------------------------------------------------ the parts


async def _answers(heed: Server, asked: Sequence[Question]) -> dict[str, dict[str, Any]]:
    """Return Heed's answers, which the floor must give too."""
    found = {}
    async with connected(heed.port, 1) as (connection,):
        for question in asked:
            answer = await connection.send(encode_post(f"/v1/{question.ask}", question.bodies[0]))
            if answer.status != 200:
                raise Unavailable(
                    f"{question.name} was answered with {answer.status}: {answer.body[:300]!r}"
                )
            found[question.name] = {"ask": question.ask, "answer": answer.json()}
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    servers: Mapping[str, Server]  # heed and floor, and the floor that works where there is one
    works: Mapping[str, Sequence[Job]]
    core: int | None  # of the servers
    rounds: int
    requests: int

    async def measure(
        self,
        asked: Sequence[Question],
        answers: Mapping[str, Mapping[str, Any]],
        concurrency: Sequence[int],
        progress: ProgressCallback,
    ) -> list[Case]:
        cases: list[Case] = []
        total = len(asked) * len(concurrency) * self.rounds
        for question in asked:
            ways = self._ways(question)
            sizes = {
                name: await _checked(server, sent[0], answers[question.name]["answer"])
                for name, (server, sent) in ways.items()
            }
            for server, sent in ways.values():
                async with connected(server.port, max(concurrency)) as connections:
                    await closed_loop(connections, sent)  # to warm up
            timed(self.works[question.name], len(self.works[question.name]))
            for count in concurrency:
                cases.append(
                    await self._case(
                        question,
                        ways,
                        count,
                        sizes,
                        lambda done: progress(len(cases) * self.rounds + done, total),
                    )
                )
        progress(total, total)
        return cases

    def _ways(self, question: Question) -> dict[str, tuple[Server, list[bytes]]]:
        """The server of each name, and what is sent to it."""
        paths = {"heed": ("heed", f"/v1/{question.ask}")}
        paths |= {name: ("floor", f"/{name}/{question.name}") for name in FLOORS}
        paths[WORKING] = (WORKING, f"/typed/{question.name}")
        return {
            name: (self.servers[server], [encode_post(path, body) for body in question.bodies])
            for name, (server, path) in paths.items()
            if server in self.servers
        }

    async def _case(
        self,
        question: Question,
        ways: Mapping[str, tuple[Server, list[bytes]]],
        concurrency: int,
        sizes: Mapping[str, int],
        progress: Callable[[int], None],
    ) -> Case:
        loads: dict[str, list[Load]] = {name: [] for name in ways}
        used: dict[str, list[float | None]] = {name: [] for name in ways}
        alone: list[float] = []
        for done in range(self.rounds):
            progress(done)
            for name, (server, made) in ways.items():
                sent = [made[at % len(made)] for at in range(self.requests)]
                # New each time: the servers hang up on whoever is silent for some seconds.
                async with connected(server.port, concurrency) as connections:
                    before = server.cpu_seconds()
                    loads[name].append(await closed_loop(connections, sent))
                    used[name].append(_less(server.cpu_seconds(), before))
            with pinned(self.core):
                alone.append(float(np.median(timed(self.works[question.name], self.requests))))
        each = {name: _mean(seconds, self.requests) for name, seconds in used.items()}
        return Case(question.name, question.events, concurrency, loads, alone, each, sizes)


async def _checked(server: Server, request: bytes, wanted: Any) -> int:
    """Bytes of the answer, which must be the wanted one. Raises `Unavailable`."""
    async with connected(server.port, 1) as (connection,):
        answer = await connection.send(request)
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
