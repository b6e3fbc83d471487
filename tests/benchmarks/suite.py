"""`make bench`: every figure a ratio of one run, reference and candidate in turns.

Absolute times drift from machine to machine and from hour to hour; what one costs beside the other,
measured in the same minute on the same core, does not. Medians of many rounds, with quartiles.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from service.domain.errors import Unavailable
from tests.benchmarks import report
from tests.benchmarks.attention import histories, kernels
from tests.benchmarks.catalogue import candidates, large_recommending
from tests.benchmarks.harness import machine
from tests.benchmarks.harness.conditions import environment, exit_on_sigterm, one_thread, serve_data
from tests.benchmarks.harness.processes import Cores, Server
from tests.benchmarks.harness.tables import stage
from tests.benchmarks.harness.timing import ProgressCallback
from tests.benchmarks.http import ingest, latency, latency_report
from tests.benchmarks.http import workers as several
from tests.benchmarks.workload.data import BenchmarkData, count_stored, prepare_data
from tests.benchmarks.workload.in_process import jobs
from tests.benchmarks.workload.loaded import LoadedData, load_data
from tests.benchmarks.workload.questions import LIMIT, TARGETS, questions


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes and repeats of a run."""

    items: int = 4_000  # of a generated data set
    users: int = 500
    memories: tuple[int, ...] = (1_000, 10_000, 100_000)
    kernel_rounds: int = 11
    catalogues: tuple[int, ...] = (5_000, 10_000, 20_000, 50_000, 100_000)
    histories: tuple[int, ...] = (50, 200, 1_000)
    judges: int = 20  # users whose best items are looked for among the candidates
    candidate_rounds: int = 7
    ingest_rounds: int = 7
    batches: int = 20
    http_rounds: int = 6
    requests: int = 96
    floor_at_work: bool = False  # also compare with a floor that does the job


FULL = Effort()
QUICK = Effort(
    kernel_rounds=5,
    catalogues=(10_000, 20_000, 50_000, 100_000),
    histories=(200,),
    judges=8,
    candidate_rounds=3,
    ingest_rounds=3,
    batches=10,
    http_rounds=3,
    requests=48,
)


def run(
    console: Console, *, data: Path | None, quick: bool = False, effort: Effort | None = None
) -> dict[str, Any]:
    """Measure everything, print it, and return it as plain values.

    Args:
        console: for progress and tables.
        data: a data directory whose store and models are copied; None generates a data set.
        quick: fewer rounds.
        effort: exactly this much instead.

    Raises:
        NotFound: when there is nothing to measure in `data`.
        Unavailable: when a server does not start, or anything answers what it should not.
    """
    effort = effort or (QUICK if quick else FULL)
    cores = Cores.choose()
    found: dict[str, Any] = {"quick": effort is QUICK}
    sizes = {"items": effort.items, "users": effort.users}
    with exit_on_sigterm(), one_thread(), prepare_data(data, **sizes) as ground:
        found["machine"] = machine.describe_machine(ground.data, cores)
        found["data"] = ground.as_dict()
        report.machine(console, found["machine"], ground)

        with stage(console, "attention") as progress:
            operator = kernels.measure(effort.memories, effort.kernel_rounds, progress=progress)
        found["kernels"] = [each.as_dict() for each in operator]
        report.kernels(console, operator)

        own = load_data(ground)
        with stage(console, "candidates") as progress:
            ranking = candidates.measure(
                effort.catalogues,
                effort.candidate_rounds,
                histories=effort.histories,
                users=effort.judges,
                own=(own.snapshot, [each.memory for each in own.users]),
                enlarge=data is not None,
                progress=progress,
            )
        found["candidates"] = ranking.as_dict()
        report.catalogues(console, ranking)

        with stage(console, "histories") as progress:
            grown = histories.measure(effort.kernel_rounds, progress=progress)
        found["histories"] = [each.as_dict() for each in grown]
        report.histories(console, grown)

        found |= _over_http(console, ground, own, cores, effort)
    return found


def run_service(
    console: Console, *, data: Path | None, quick: bool = False, effort: Effort | None = None
) -> dict[str, Any]:
    """Measure what is asked over HTTP alone, print it, and return it as plain values.

    The arguments and errors are those of `run`.
    """
    effort, cores = effort or (QUICK if quick else FULL), Cores.choose()
    sizes = {"items": effort.items, "users": effort.users}
    with exit_on_sigterm(), one_thread(), prepare_data(data, **sizes) as ground:
        found = {"machine": machine.describe_machine(ground.data, cores), "data": ground.as_dict()}
        report.machine(console, found["machine"], ground)
        with serve_data(ground, cores) as heed:
            found["http"] = _questions(
                console, ground, load_data(ground), heed, cores, effort, working=ground.data
            )
    return found


def run_recommending(
    console: Console, items: int, *, data: Path | None, quick: bool = False
) -> dict[str, Any]:
    """Measure recommending from a large catalogue, print it, and return it as plain values.

    Args:
        console: for progress and tables.
        items: of the catalogue, at least.
        data: a data directory whose items are copied; None generates them.
        quick: fewer rounds.

    Raises:
        Invalid: when `data` has no trained model.
        NotFound: when there is nothing to measure in `data`.
        Unavailable: when the server does not start, or does not answer.
    """
    effort, cores = QUICK if quick else FULL, Cores.choose()
    sizes = {"items": effort.items, "users": effort.users}
    with (
        exit_on_sigterm(),
        one_thread(),
        prepare_data(data, **sizes) as ground,
        ExitStack() as stages,
    ):

        def start_stage(name: str) -> ProgressCallback:
            stages.close()  # one bar at a time
            return stages.enter_context(stage(console, name))

        found = {"machine": machine.describe_machine(ground.data, cores), "data": ground.as_dict()}
        report.machine(console, found["machine"], ground)
        large = large_recommending.measure(
            ground,
            load_data(ground),
            items,
            cores,
            environment(),
            rounds=effort.http_rounds,
            requests=effort.requests,
            stage=start_stage,
        )
    console.print(large_recommending.shown(large))
    return found | large.as_dict()


def run_workers(
    console: Console, workers: int, *, data: Path | None, items: int, rounds: int, requests: int
) -> dict[str, Any]:
    """Measure several workers beside one, print it, and return it as plain values.

    Args:
        console: for progress and tables.
        workers: how many are several; at least 2.
        data: a data directory whose store and models are copied; None generates a data set.
        items: how many to generate.
        rounds: of each question.
        requests: to each server in each round.

    Raises:
        NotFound: when there is nothing to measure in `data`.
        Unavailable: when a server does not start, or does not answer.
    """
    with exit_on_sigterm(), one_thread(), prepare_data(data, items=items) as ground:
        found = {
            "machine": machine.describe_machine(ground.data, Cores.choose()),
            "data": ground.as_dict(),
        }
        with stage(console, "questions") as progress:
            shared = several.measure(
                ground,
                workers,
                rounds=rounds,
                requests=requests,
                environment=environment(),
                progress=progress,
            )
    for table in several.shown(shared):
        console.print(table)
    return found | shared.as_dict()


def _over_http(
    console: Console, ground: BenchmarkData, own: LoadedData, cores: Cores, effort: Effort
) -> dict[str, Any]:
    """Measure ingestion and requests, which need a server."""
    memory = {}
    with serve_data(ground, cores) as heed:
        memory["started"] = heed.memory()
        with stage(console, "ingestion") as progress:
            ingested = ingest.measure(
                ground,
                heed,
                cores,
                rounds=effort.ingest_rounds,
                batches_a_round=effort.batches,
                progress=progress,
            )
        memory["after ingestion"] = heed.memory()
        report.ingestion(console, ingested)
        working = ground.data if effort.floor_at_work else None
        asked = _questions(console, ground, own, heed, cores, effort, working=working)
        memory["after questions"] = heed.memory()
        report.memory(console, memory)
    stored = count_stored(ground)
    if stored != ground.events + ingested.events:
        raise Unavailable(
            f"{ingested.events:,} events were acknowledged beside the {ground.events:,} there "
            f"were, and {stored:,} are stored"
        )
    return {"ingest": ingested.as_dict(), "http": asked, "memory": memory}


def _questions(
    console: Console,
    ground: BenchmarkData,
    own: LoadedData,
    heed: Server,
    cores: Cores,
    effort: Effort,
    *,
    working: Path | None = None,
) -> dict[str, Any]:
    """Measure requests to a server, beside the floor and the job alone."""
    asked = questions(ground)
    with stage(console, "questions") as progress:
        cases = latency.measure(
            asked,
            jobs(ground, own, asked),
            heed,
            cores,
            rounds=effort.http_rounds,
            requests=effort.requests,
            progress=progress,
            working=working,
            environment=environment(),
        )
    latency_report.shown(console, cases)
    return {
        "targets": TARGETS,
        "limit": LIMIT,
        "loop": "closed",
        "cases": [case.as_dict() for case in cases],
    }
