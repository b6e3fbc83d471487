"""Behaviour beyond capacity: what still succeeds, and how fast the rest is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import uvloop

from service.domain.errors import Unavailable
from service.lab.load_options import Options, parse_mix
from service.lab.open_loop import PREPARED, OpenLoop, Recording, draw_schedule
from service.lab.workload import Requests, draw_sample, open_http
from tests.benchmarks.harness.closed_loop import closed_loop, connected
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, pinned
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, spread

FACTORS = (1, 2, 3)  # times the capacity
CONNECTIONS = 8  # of the closed loop: enough to keep the server busy
_REFUSED = (429, 503)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One open loop at a rate."""

    rate: float  # requests a second that were due
    goodput: float  # successes within the deadline, a second
    accepted: Sequence[float]  # seconds from due to done: p50, p99
    refused: Sequence[float]  # seconds from sent to done: p50, p99; NaN without refusals
    other: int  # failures that are no refusals
    late: float  # p99 of the generator's own delay


@dataclass(frozen=True, slots=True)
class OverloadResults:
    """Capacity in requests a second, round by round, and attempts by factor, round by round."""

    deadline: float
    capacity: Sequence[float]
    attempts: dict[int, list[Attempt]]

    def kept(self, factor: int) -> Spread:
        """Goodput over the peak of the same round: of the closed loop, or of any rate."""
        peaks = [
            max(capacity, *(attempts[number].goodput for attempts in self.attempts.values()))
            for number, capacity in enumerate(self.capacity)
        ]
        found = self.attempts[factor]
        return spread([each.goodput / peak for each, peak in zip(found, peaks, strict=True)])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "deadline": self.deadline,
            "capacity": spread(self.capacity).as_dict(),
            "rates": {
                factor: {
                    "goodput_of_peak": self.kept(factor).as_dict(),
                    **{name: _median(found, name) for name in ("rate", "goodput", "other", "late")},
                    "accepted": _medians(found, "accepted"),
                    "refused": _medians(found, "refused"),
                }
                for factor, found in self.attempts.items()
            },
        }

    def rows(self) -> list[list[str]]:
        """The lines of a table, one for each factor."""
        lines = []
        for factor, found in self.attempts.items():
            kept = self.kept(factor)
            lines.append(
                [
                    f"{factor} ×",
                    f"{_median(found, 'rate'):.0f}",
                    f"{_median(found, 'goodput'):.0f}",
                    f"{kept.median:.2f} ({kept.low:.2f}–{kept.high:.2f})",
                    *(f"{1e3 * each:.0f}" for each in _medians(found, "accepted")),
                    *(f"{1e3 * each:.1f}" for each in _medians(found, "refused")),
                    f"{sum(each.other for each in found)}",
                    f"{1e3 * _median(found, 'late'):.1f}",
                ]
            )
        return lines


COLUMNS = (
    *("load", "sent a second", "goodput", "of the peak", "accepted p50, ms", "p99"),
    *("refused p50, ms", "p99", "other failures", "generator late p99"),
)


def measure(
    server: Server,
    cores: Cores,
    *,
    deadline: float,
    mix: str,
    rounds: int,
    seconds: float,
    closed: int = PREPARED,
    progress: ProgressCallback = no_progress,
) -> OverloadResults:
    """Measure the capacity in a closed loop, then load the server beyond it, round by round.

    Args:
        server: Heed.
        cores: of server and client.
        deadline: HEED_DEADLINE of the server, in seconds.
        mix: shares by kind of request, as `heed loadtest` takes them.
        rounds: repeats of everything.
        seconds: of each open loop.
        closed: requests of each closed loop, about.
        progress: called with the number of loads that are done, and of all.

    Raises:
        Unavailable: when the closed loop has failures that are no refusals.
    """
    options = Options(
        f"http://127.0.0.1:{server.port}", duration=seconds, warmup=min(1.0, seconds / 4), mix=mix
    )
    results = OverloadResults(deadline, [], {factor: [] for factor in FACTORS})
    capacity: list[float] = []
    total = rounds * (1 + len(FACTORS))
    with open_http(options) as http, pinned(cores.client):
        requests = Requests(parse_mix(mix), draw_sample(http, options.users, options.seed), options)
        for _ in range(rounds):
            capacity.append(_closed(server, requests, options, closed))
            for factor in FACTORS:
                progress(len(capacity) + sum(map(len, results.attempts.values())), total)
                rate = factor * capacity[-1]
                recording = uvloop.run(send(options, requests, rate))
                results.attempts[factor].append(_summarize(recording, rate, deadline))
    progress(total, total)
    return OverloadResults(deadline, capacity, results.attempts)


async def send(options: Options, requests: Requests, rate: float) -> Recording:
    """Send requests at a rate, in an open loop."""
    return await OpenLoop(options, draw_schedule(rate, options), requests.encode).run()


# ------------------------------------------------------------------------------ the parts


def _closed(server: Server, requests: Requests, options: Options, count: int) -> float:
    """Successes a second of some connections that each wait for their answers."""
    drawn = draw_schedule(count / (options.warmup + options.duration), options)
    sent = [
        encode_post(path, orjson.loads(body))
        for kind, pick in zip(drawn.kind, drawn.pick, strict=True)
        for path, body in [requests.encode(drawn.kinds[kind], int(pick))]
    ]

    async def load() -> float:
        async with connected(server.port, CONNECTIONS) as connections:
            found = await closed_loop(connections, sent)
        refused = sum(answer.status in _REFUSED for answer in found.answers)
        if found.failed > refused:
            raise Unavailable(f"{found.failed - refused} of {len(sent)} requests failed")
        return (len(sent) - refused) / found.seconds

    return uvloop.run(load())


def _summarize(recording: Recording, rate: float, deadline: float) -> Attempt:
    due = recording.due()
    refused = due & np.isin(recording.status, _REFUSED)
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


def _median(found: Sequence[Attempt], name: str) -> float:
    return float(np.median([getattr(each, name) for each in found]))


def _medians(found: Sequence[Attempt], name: str) -> list[float]:
    return [float(np.median([getattr(each, name)[at] for each in found])) for at in range(2)]
