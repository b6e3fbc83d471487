"""Questions that several setups of servers are asked in turns, in a closed loop of 16 connections.

The client needs a processor too: where there is none beside those of the servers, it takes from
theirs, and so the processor time of each request stands beside the requests a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table

from service.domain.errors import Unavailable
from tests.benchmarks.harness.closed_loop import Load, closed_loop, connected
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Server, busy_seconds
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, ratios, spread
from tests.benchmarks.workload.data import BenchmarkData
from tests.benchmarks.workload.questions import questions

CONNECTIONS = 16  # to each setup, of which every server of it has as many
_QUIET = 0.15  # cores that other processes keep busy, at most


class Served(NamedTuple):
    """Servers that are asked alike, and what works for them: a database."""

    servers: Sequence[Server]
    behind: Sequence[Server] = ()

    def cpu_seconds(self) -> float:
        """Processor time of all of them so far; 0 where that cannot be known."""
        return sum(each.cpu_seconds() or 0.0 for each in (*self.servers, *self.behind))


class Round(NamedTuple):
    """Responses of one setup in one round, with processor seconds."""

    load: Load
    served: float  # of the server
    client: float
    others: float | None  # of all else on the machine; None where there is no /proc

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.load.answers) / self.load.seconds

    @property
    def quiet(self) -> bool:
        """Whether other processes kept the machine almost idle."""
        return self.others is not None and self.others < _QUIET * self.load.seconds


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of question, asked of every setup in each round."""

    question: str
    rounds: Mapping[str, Sequence[Round]]  # by setup

    def rate(self, setup: str) -> Spread:
        """Requests a second."""
        return spread([each.rate for each in self.rounds[setup]])

    def ratio(
        self, setup: str, reference: str, *, quiet: bool = False
    ) -> tuple[Spread, int] | None:
        """Requests a second over those of another setup, round by round, and of how many rounds.

        Args:
            setup: the one.
            reference: the other.
            quiet: only of rounds in which the machine did hardly anything else; None without any.
        """
        pairs = [
            (one.rate, other.rate)
            for one, other in zip(self.rounds[setup], self.rounds[reference], strict=True)
            if not quiet or (one.quiet and other.quiet)
        ]
        return (ratios(*zip(*pairs, strict=True)), len(pairs)) if pairs else None

    def each(self, of: str, setup: str) -> float:
        """Processor seconds of a request: `served` or `client`."""
        rounds = self.rounds[setup]
        seconds: float = sum(getattr(each, of) for each in rounds)
        return seconds / sum(len(each.load.answers) for each in rounds)

    def busy(self, of: str, setup: str) -> float:
        """Return the cores that `served`, `client` or `others` kept busy."""
        rounds = self.rounds[setup]
        seconds: float = sum(getattr(each, of) or 0.0 for each in rounds)
        return seconds / sum(each.load.seconds for each in rounds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        first = next(iter(self.rounds))

        def ratio(name: str, *, quiet: bool) -> dict[str, float] | None:
            found = self.ratio(name, first, quiet=quiet)
            return None if found is None else {**found[0].as_dict(), "rounds": found[1]}

        return {
            "question": self.question,
            "setups": {
                name: {
                    "requests_per_second": self.rate(name).as_dict(),
                    "ratio": ratio(name, quiet=False),
                    "ratio_of_quiet_rounds": ratio(name, quiet=True),
                    "server_seconds": self.each("served", name),
                    "client_seconds": self.each("client", name),
                    "cores": {
                        "server": self.busy("served", name),
                        "client": self.busy("client", name),
                        "others": self.busy("others", name),
                    },
                }
                for name in self.rounds
            },
        }


async def ask_in_turns(
    ground: BenchmarkData,
    setups: Mapping[str, Served],
    rounds: int,
    requests: int,
    progress: ProgressCallback = no_progress,
) -> list[Case]:
    """Ask every setup each kind of question: searches, and those of the user of least events.

    Args:
        ground: whose users ask about whose items.
        setups: by name; the first is what the others are compared with.
        rounds: of each question, beside one to warm up.
        requests: to each setup in each round.
        progress: called with the number of rounds that are done.

    Raises:
        Unavailable: when anything is answered with an error.
    """
    shortest = min(events for _, events in ground.askers)
    asked = {
        question.name: (question.ask, question.bodies)
        for question in questions(ground)
        if question.events in {0, shortest}
    }
    cases: list[Case] = []
    for question, (path, bodies) in asked.items():
        sent = [encode_post(f"/v1/{path}", bodies[at % len(bodies)]) for at in range(requests)]
        found: dict[str, list[Round]] = {name: [] for name in setups}
        for turn in range(-1, rounds):  # the first warms up
            progress(len(cases) * rounds + max(0, turn), len(asked) * rounds)
            names = list(setups)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                done = await _round(setups[name], sent)
                for answer in done.load.answers:
                    if answer.status != 200:
                        what = f"{answer.status}: {answer.body[:300]!r}"
                        raise Unavailable(f"{name} answered {question} with {what}")
                if turn >= 0:
                    found[name].append(done)
        cases.append(Case(question, found))
    progress(len(asked) * rounds, len(asked) * rounds)
    return cases


async def _round(setup: Served, sent: Sequence[bytes]) -> Round:
    def used() -> tuple[float, float, float | None]:
        return setup.cpu_seconds(), time.process_time(), busy_seconds()

    # New each time: which worker has how many of them is another draw.
    async with AsyncExitStack() as stack:
        each = CONNECTIONS // len(setup.servers)
        connections = [
            connection
            for server in setup.servers
            for connection in await stack.enter_async_context(connected(server.port, each))
        ]
        before = used()
        load = await closed_loop(connections, sent)
        after = used()
    served, client = after[0] - before[0], after[1] - before[1]
    others = None
    if after[2] is not None and before[2] is not None:
        others = max(0.0, after[2] - before[2] - served - client)
    return Round(load, served, client, others)


def speed_table(cases: Sequence[Case], client: frozenset[int]) -> Table:
    """Return the requests a second of all setups as a table."""
    speed = Table(title=f"Requests a second, {CONNECTIONS} connections in a closed loop")
    for heading in (
        *("question", "served by", "a second", "ratio", "in quiet rounds", "CPU each", "cores"),
        *("client's", "others'"),
    ):
        speed.add_column(
            heading, justify="left" if heading in {"question", "served by"} else "right"
        )
    for case in cases:
        first = next(iter(case.rounds))
        for name in case.rounds:
            speed.add_row(
                case.question if name == first else "",
                name,
                f"{case.rate(name).median:.0f}",
                "" if name == first else _ratio(case.ratio(name, first)),
                "" if name == first else _ratio(case.ratio(name, first, quiet=True)),
                f"{1e3 * case.each('served', name):.2f} ms",
                *(f"{case.busy(of, name):.2f}" for of in ("served", "client", "others")),
            )
    speed.caption = (
        "CPU each: of the server for a request. Cores: that the server, the client (on "
        + ", ".join(map(str, sorted(client)))
        + f") and all else kept busy; a round is quiet where that is less than {_QUIET}."
    )
    return speed


def _ratio(found: tuple[Spread, int] | None) -> str:
    if found is None:
        return "none"
    (median, low, high), rounds = found
    return f"{median:.2f} ({low:.2f}–{high:.2f}; {rounds})"
