"""`make bench ARGS=workers`: one worker and several answer alike; figures are their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarks.conftest import serving_on_a_thread
from tests.benchmarks.harness.closed_loop import Load
from tests.benchmarks.harness.http_client import Response
from tests.benchmarks.harness.processes import Server
from tests.benchmarks.http import workers as several
from tests.benchmarks.http.rounds import Case, Round
from tests.benchmarks.http.workers import Setup, setups
from tests.benchmarks.workload.data import prepare_data


def test_a_small_run_measures_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setup answers each question in each round; real workers run in the acceptance tests."""
    calls: list[tuple[int, int]] = []
    started: list[str] = []

    def start(arguments: Sequence[str], **options: Any) -> AbstractContextManager[Server]:
        started.append(" ".join(arguments[-2:]))
        return serving_on_a_thread(arguments, **options)

    monkeypatch.setattr(several, "serving", start)
    with prepare_data(None, items=300, users=4) as ground:
        found = several.measure(
            ground,
            2,
            rounds=1,
            requests=16,
            environment={"HEED_DEADLINE": "60", "HEED_LOG_LEVEL": "warning"},
            progress=lambda done, whole: calls.append((done, whole)),
        )
    ways = setups(2)[0]
    names = [str(way) for way in ways]
    assert started == [f"--workers {way.workers}" for way in ways]
    assert [case.question for case in found.cases] == ["score-200", "recommend-200", "search"]
    for case in found.cases:
        assert list(case.rounds) == names
        for rounds in case.rounds.values():
            (only,) = rounds
            assert (len(only.load.answers), only.load.failed) == (16, 0)
            assert only.served > 0
            assert only.client > 0
    assert calls[-1] == (3, 3)
    for process, *_ in found.memory.values():  # the tests' own, which may have children
        assert process["private"] > 0
        assert process["proportional"] > process["private"]
    shown = Console(record=True, width=160)
    for table in several.shown(found):
        shown.print(table)
    text = shown.export_text()
    assert all(name in text for name in names)
    assert found.as_dict()["cases"][0]["setups"][names[1]]["requests_per_second"]["median"] > 0


def test_ratios_are_per_round_and_may_exclude_noisy_rounds() -> None:
    """What else the machine did in a round keeps it from the ratio of quiet rounds."""

    def done(requests: int, others: float | None) -> Round:
        return Round(Load(1.0, [], [Response() for _ in range(requests)]), 0.5, 0.1, others)

    case = Case(
        "score",
        {
            "one": [done(10, 0.0), done(10, 1.0), done(10, 0.1)],
            "two": [done(20, 0.1), done(11, 0.0), done(18, None)],
        },
    )
    every, quiet = case.ratio("two", "one"), case.ratio("two", "one", quiet=True)
    assert every is not None
    assert (round(every[0].median, 6), every[1]) == (1.8, 3)
    assert quiet is not None
    assert (quiet[0].median, quiet[1]) == (2.0, 1)
    assert Case("score", {"one": [done(1, 1.0)]}).ratio("one", "one", quiet=True) is None
    assert case.each("served", "two") == pytest.approx(1.5 / 49)
    assert case.busy("others", "one") == pytest.approx(1.1 / 3)


def test_client_gets_its_own_core_where_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cores are those that no server uses; where there are none, all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7, 8})
    ways, client = setups(2)
    both = frozenset({3, 5})
    assert ways == [Setup(1, frozenset({3})), Setup(2, both), Setup(1, both)]
    assert client == {7, 8}
    assert setups(4)[1] == {3, 5, 7, 8}
