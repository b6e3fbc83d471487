"""The cost of HTTP over the job: score, recommend and search, one and 16 at once.

Beside a bare FastAPI app that answers the same bytes, and the same jobs without a service. With c
connections that never rest, a request takes its latency / c of the server's time (Little's law,
L = λW: https://doi.org/10.1287/opre.9.3.383).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import orjson
import typer

from tests.benchmarks.harness.client import ask, encode_post
from tests.benchmarks.harness.data import prepare_data, questions
from tests.benchmarks.harness.jobs import Job, jobs, load_data
from tests.benchmarks.harness.options import Data, Requests, Rounds
from tests.benchmarks.harness.servers import Cores, heed, pinned, serving
from tests.benchmarks.harness.tables import ms, print_machine, ratio, table
from tests.benchmarks.harness.timing import Spread, ratios
from tests.benchmarks.harness.turns import Case, Subject, ask_in_turns


def service(
    data: Data = None,
    rounds: Rounds = 6,
    requests: Requests = 96,
    items: Annotated[int, typer.Option(min=100, help="Of a generated catalogue.")] = 4_000,
) -> None:
    """Measure what HTTP adds to the job: score, recommend and search, one and 16 at once."""
    cores = Cores.choose()
    print_machine(cores)
    with prepare_data(data, items=items) as ground:
        asked = questions(ground)
        works = jobs(load_data(ground.data, [user for user, _ in ground.askers]), asked)
        alone: dict[str, list[float]] = {question.name: [] for question in asked}

        def do_job(question: str) -> None:
            with pinned(cores.server):
                alone[question].append(_median(works[question], requests))

        with (
            heed(ground.data, core=cores.server) as server,
            tempfile.NamedTemporaryFile(suffix=".json") as file,
        ):
            answers = {
                str(number): {"ask": each.ask, "answer": ask(server.port, each.requests()[:1])
                              .answers[0].json()}
                for number, each in enumerate(asked)
            }  # fmt: skip
            Path(file.name).write_bytes(orjson.dumps(answers))
            with (
                serving(["-m", "tests.benchmarks.floor", file.name], core=cores.server) as floor,
                pinned(cores.client),
            ):
                subjects = [Subject("Heed", [server], {q.name: q.requests() for q in asked})]
                for kind in ("plain", "typed"):
                    sent = {
                        each.name: [encode_post(f"/{kind}/{number}", body) for body in each.bodies]
                        for number, each in enumerate(asked)
                    }
                    subjects.append(Subject(f"{kind} floor", [floor], sent))
                cases = ask_in_turns(subjects, rounds=rounds, requests=requests, also=do_job)
            memory = server.resident()
    _print(cases, alone, rounds, memory)


def _median(works: Sequence[Job], times: int) -> float:
    """Median seconds of calls, of one job after the other."""
    seconds = []
    for number in range(times):
        started = time.perf_counter()
        works[number % len(works)]()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def _print(cases: Sequence[Case], alone: dict[str, list[float]], rounds: int, memory: int) -> None:
    """Print the table of docs/results.md."""
    rows = []
    for number, case in enumerate(cases):
        # The rounds of a question with one connection come first, then those with more.
        first = rounds * (number and case.question == cases[number - 1].question)
        job = alone[case.question][first : first + rounds]
        over = over_floor_and_job(case, job)
        rows.append(
            (
                case.question,
                f"{case.connections}",
                f"{np.median(case.rates('Heed')):.0f}",
                ms(case.percentile("Heed", 50)),
                ms(case.percentile("Heed", 99)),
                ms(case.cpu("Heed")),
                ms(case.percentile("plain floor", 50)),
                ms(case.percentile("typed floor", 50)),
                ms(float(np.median(job))),
                ratio(over),
            )
        )
    table(
        "Questions over HTTP, closed loop; milliseconds",
        ("question", "at once", "a second", "p50", "p99", "CPU", "plain floor p50",
         "typed floor p50", "job", "over floor and job"),
        rows,
        caption="The floors are a bare FastAPI app that answers the same: plain, by orjson; typed, "
        "through a response model. Over floor and job: time of a request over that of the typed "
        f"floor and the job together. The server holds {memory / 2**20:.0f} MiB.",
    )  # fmt: skip


def over_floor_and_job(case: Case, job: Sequence[float]) -> Spread:
    """Heed's time for a request over the typed floor's and the job's together, by rounds."""
    together = [
        floor / case.connections + alone
        for floor, alone in zip(case.medians("typed floor"), job, strict=True)
    ]
    return ratios([each / case.connections for each in case.medians("Heed")], together)
