"""Behaviour beyond capacity: what still succeeds, and how fast the rest is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import orjson
import typer
import uvloop

from service.domain.errors import Unavailable
from service.lab.load_options import DEFAULT_MIX, Options, parse_mix
from service.lab.open_loop import PREPARED, REFUSED, OpenLoop, Recording, draw_schedule
from service.lab.workload import Requests, draw_sample, open_http
from tests.benchmarks.harness.client import closed_loop, connected, encode_post
from tests.benchmarks.harness.data import prepare_data
from tests.benchmarks.harness.options import Data, Rounds, Seconds
from tests.benchmarks.harness.servers import Cores, Server, heed, pinned
from tests.benchmarks.harness.tables import print_machine, rate, ratio, rounds_of, table
from tests.benchmarks.harness.timing import spread

FACTORS = (1, 2, 3)  # times the capacity
CONNECTIONS = 8  # of the closed loop: enough to keep the server busy


@dataclass(frozen=True, slots=True)
class Attempt:
    """One open loop at a rate."""

    rate: float  # requests a second that were due
    goodput: float  # successes within the deadline, a second
    accepted: Sequence[float]  # seconds from due to done: p50, p99
    refused: Sequence[float]  # seconds from sent to done: p50, p99; NaN without refusals
    other: int  # failures that are no refusals
    late: float  # p99 of the generator's own delay


def overload(
    data: Data = None,
    mix: Annotated[str, typer.Option(help="Shares by kind of request.")] = DEFAULT_MIX,
    deadline: Annotated[float, typer.Option(min=0.05, help="HEED_DEADLINE, seconds.")] = 1.0,
    rounds: Rounds = 3,
    seconds: Seconds = 8.0,
) -> None:
    """Load a service with once, twice and three times its capacity, in an open loop.

    The capacity is that of a closed loop in the same round.
    """
    cores = Cores.choose()
    print_machine(cores)
    capacity: list[float] = []
    attempts: dict[int, list[Attempt]] = {factor: [] for factor in FACTORS}
    with (
        prepare_data(data) as ground,
        heed(ground.data, core=cores.server, deadline=deadline) as server,
    ):
        options = load_options(server, seconds, mix)
        with open_http(options) as http, pinned(cores.client):
            sample = draw_sample(http, options.users, options.seed)
            requests = Requests(parse_mix(mix), sample, options)
            for _ in rounds_of(rounds, "overload"):
                capacity.append(_closed(server, requests, options))
                for factor in FACTORS:
                    wanted = factor * capacity[-1]
                    recording = uvloop.run(send(options, requests, wanted))
                    attempts[factor].append(_summarize(recording, wanted, deadline))
    peaks = [
        max(own, *(made[number].goodput for made in attempts.values()))
        for number, own in enumerate(capacity)
    ]
    table(
        f"Load beside capacity, {rate(spread(capacity))} requests a second",
        ("load", "sent a second", "goodput", "of the peak", "accepted p50, ms", "p99",
         "refused p50, ms", "p99", "other failures", "generator late p99"),
        (
            (
                f"{factor} ×",
                f"{_median(made, 'rate'):.0f}",
                f"{_median(made, 'goodput'):.0f}",
                ratio(spread([a.goodput / peak for a, peak in zip(made, peaks, strict=True)])),
                *(f"{1e3 * each:.0f}" for each in _medians(made, "accepted")),
                *(f"{1e3 * each:.1f}" for each in _medians(made, "refused")),
                f"{sum(each.other for each in made)}",
                f"{1e3 * _median(made, 'late'):.1f}",
            )
            for factor, made in attempts.items()
        ),
    )  # fmt: skip


def load_options(server: Server, seconds: float, mix: str) -> Options:
    """Options of an open loop against a server."""
    url = f"http://127.0.0.1:{server.port}"
    return Options(url, duration=seconds, warmup=min(1.0, seconds / 4), mix=mix)


async def send(options: Options, requests: Requests, rate: float) -> Recording:
    """Send requests at a rate, in an open loop."""
    return await OpenLoop(options, draw_schedule(rate, options), requests.encode).run()


def _closed(server: Server, requests: Requests, options: Options) -> float:
    """Successes a second of some connections that each wait for their answers."""
    drawn = draw_schedule(PREPARED / (options.warmup + options.duration), options)
    sent = [
        encode_post(path, orjson.loads(body))
        for kind, pick in zip(drawn.kind, drawn.pick, strict=True)
        for path, body in [requests.encode(drawn.kinds[kind], int(pick))]
    ]

    async def load() -> float:
        async with connected(server.port, CONNECTIONS) as connections:
            found = await closed_loop(connections, sent)
        statuses = [answer.status for answer in found.answers]
        good = statuses.count(200)
        if any(status not in (200, *REFUSED) for status in statuses):
            raise Unavailable(f"requests were answered with {sorted(set(statuses))}")
        return good / found.seconds

    return float(uvloop.run(load()))


def _summarize(recording: Recording, rate: float, deadline: float) -> Attempt:
    due = recording.due()
    refused = due & np.isin(recording.status, REFUSED)
    accepted = recording.latencies()
    span = recording.schedule.due[due].max() - recording.schedule.warmup
    late = (recording.woke - recording.schedule.due)[due]
    return Attempt(
        rate,
        float((accepted <= deadline).sum() / span),
        _percentiles(accepted),
        _percentiles((recording.done - recording.sent)[refused]),
        int(due.sum() - refused.sum() - len(accepted)),
        float(np.percentile(late, 99)),
    )


def _percentiles(seconds: Any) -> Sequence[float]:
    if not len(seconds):
        return (float("nan"), float("nan"))
    return tuple(np.percentile(seconds, (50, 99)).tolist())


def _median(made: Sequence[Attempt], name: str) -> float:
    return float(np.median([getattr(each, name) for each in made]))


def _medians(made: Sequence[Attempt], name: str) -> list[float]:
    return [float(np.median([getattr(each, name)[at] for each in made])) for at in range(2)]
