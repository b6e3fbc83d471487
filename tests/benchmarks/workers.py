"""Requests a second and memory of one worker and of several."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Annotated

import typer

from tests.benchmarks.harness.data import prepare_data, questions
from tests.benchmarks.harness.options import Data, Requests, Rounds
from tests.benchmarks.harness.servers import heed, pinned
from tests.benchmarks.harness.tables import mib, print_machine, table
from tests.benchmarks.harness.turns import Subject, ask_in_turns, print_cases


def workers(
    workers: Annotated[int, typer.Option(min=2, help="How many to compare with one.")] = 2,
    data: Data = None,
    rounds: Rounds = 9,
    requests: Requests = 320,
) -> None:
    """Measure what several workers answer and hold beside one, over HTTP.

    If there are no cores beside those of the servers, the client takes from what they could do.
    """
    allowed = sorted(os.sched_getaffinity(0))
    few = frozenset(allowed[:workers])
    client = frozenset(allowed[workers:]) or frozenset(allowed)
    print_machine(f"client on cores {sorted(client)}")
    setups = {
        "1 worker, 1 core": (1, frozenset(allowed[:1])),
        f"{workers} workers, {len(few)} cores": (workers, few),
        f"1 worker, {len(few)} cores": (1, few),
    }
    with prepare_data(data) as ground, ExitStack() as stack:
        asked = {each.name: each.requests() for each in questions(ground, [200])}
        subjects = [
            Subject(
                name,
                [stack.enter_context(heed(ground.data, core=cores, workers=count))],
                asked,
            )
            for name, (count, cores) in setups.items()
        ]
        with pinned(client):
            cases = ask_in_turns(subjects, connections=[16], rounds=rounds, requests=requests)
        memory = {each.name: each.servers[0].memory() for each in subjects}
    print_cases("Requests a second, in a closed loop", cases)
    table(
        "Memory, pages that several processes share counted once",
        ("served by", "in all", "of each process alone", "shared by each"),
        (
            (
                name,
                mib(sum(each["proportional"] for each in processes)),
                ", ".join(mib(each["private"]) for each in processes),
                ", ".join(mib(each["shared"]) for each in processes),
            )
            for name, processes in memory.items()
        ),
    )
