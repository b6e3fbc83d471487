"""Peers asked the same questions in turns, over HTTP by one client or in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from service.domain.errors import Unavailable
from tests.benchmarks.harness.closed_loop import Load, closed_loop, connected
from tests.benchmarks.harness.http_client import Response
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, ratios

HEED = "Heed"


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that listens, and what it is asked: the same questions in each one's own words."""

    name: str
    port: int
    questions: Mapping[str, Sequence[bytes]]  # by kind, requests of `client.post`
    settings: str  # version and options, as the report states them
    why: str = ""  # what it does not do that Heed does, where it is faster


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of question at one concurrency: what each peer did, round by round."""

    kind: str
    connections: int
    latencies: Mapping[str, Sequence[Sequence[float]]]  # by peer: seconds of requests, by round
    seconds: Mapping[str, Sequence[float]]  # by peer: from first request to last answer, by round

    def percentile(self, name: str, percent: float) -> float:
        """Seconds, over the requests of all rounds."""
        return float(np.percentile(np.concatenate(self.latencies[name]), percent))

    def rate(self, name: str) -> float:
        """Requests answered a second."""
        return sum(map(len, self.latencies[name])) / sum(self.seconds[name])

    def times(self, name: str) -> Spread:
        """Ratio of another's time to Heed's for the same questions, round by round."""
        return ratios(self.seconds[name], self.seconds[HEED])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "question": self.kind,
            "connections": self.connections,
            "peers": {
                name: {
                    **{f"p{p}_seconds": self.percentile(name, p) for p in (50, 95, 99)},
                    "requests_a_second": self.rate(name),
                    "heed_times_as_fast": self.times(name).as_dict(),
                }
                for name in self.latencies
            },
        }


def measure(
    peers: Sequence[Peer],
    concurrency: Sequence[int],
    *,
    rounds: int,
    requests: int,
    progress: ProgressCallback = no_progress,
) -> list[Case]:
    """Ask all of them in every round, in an order that turns round by round.

    A round with all their requests goes before, and does not count.

    Args:
        peers: Heed among them; a kind of question that one does not have, it is not asked.
        concurrency: connections that ask at once.
        rounds: of each kind of question at each concurrency.
        requests: to each peer in each round.
        progress: called with the number of rounds that are done.

    Raises:
        Unavailable: when a question is not answered with 200.
    """
    return uvloop.run(_measure(peers, concurrency, rounds, requests, progress))


def answers(
    peer: Peer, requests: Sequence[bytes], progress: ProgressCallback = no_progress
) -> list[Response]:
    """Return a peer's answers to requests, in order, one at a time. Raises as `measure`."""

    async def ask() -> list[Response]:
        found = []
        async with connected(peer.port, 1) as (connection,):
            for at, request in enumerate(requests):
                found.append(await connection.send(request))
                _check(peer, found[-1])
                progress(at + 1, len(requests))
        return found

    return uvloop.run(ask())


@dataclass(slots=True)
class _Taken:
    latencies: list[Sequence[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


async def _measure(
    peers: Sequence[Peer],
    concurrency: Sequence[int],
    rounds: int,
    requests: int,
    progress: ProgressCallback,
) -> list[Case]:
    kinds = list(dict.fromkeys(kind for peer in peers for kind in peer.questions))
    total, cases = len(kinds) * len(concurrency) * rounds, list[Case]()
    for kind in kinds:
        asked = [peer for peer in peers if kind in peer.questions]
        for peer in asked:
            await _turn(peer, peer.questions[kind], max(concurrency))
        for connections in concurrency:
            taken = {peer.name: _Taken() for peer in asked}
            for number in range(rounds):
                progress(len(cases) * rounds + number, total)
                turn = number % len(asked)
                for peer in asked[turn:] + asked[:turn]:
                    own = peer.questions[kind]
                    # The same questions for all, and others in the next round.
                    sent = [own[(number * requests + at) % len(own)] for at in range(requests)]
                    load = await _turn(peer, sent, connections)
                    taken[peer.name].latencies.append(load.latencies)
                    taken[peer.name].seconds.append(load.seconds)
            cases.append(
                Case(
                    kind,
                    connections,
                    {name: each.latencies for name, each in taken.items()},
                    {name: each.seconds for name, each in taken.items()},
                )
            )
    progress(total, total)
    return cases


async def _turn(peer: Peer, sent: Sequence[bytes], connections: int) -> Load:
    # New connections each time: servers hang up on whoever is silent for some seconds.
    async with connected(peer.port, connections) as open_ones:
        load = await closed_loop(open_ones, sent)
    for answer in load.answers:
        _check(peer, answer)
    return load


def _check(peer: Peer, answer: Response) -> None:
    if answer.status != 200:
        raise Unavailable(f"{peer.name} answered {answer.status}: {answer.body[:300]!r}")


def verdict(times: Spread) -> str:
    """Say in a word whether Heed is faster; quartiles on both sides of 1 decide nothing."""
    if times.low > 1:
        return "faster"
    return "slower" if times.high < 1 else "as fast"
