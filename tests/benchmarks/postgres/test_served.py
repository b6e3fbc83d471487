"""`make bench ARGS=postgres`, over HTTP: every part runs, and stores what it acknowledged."""

from __future__ import annotations

import io

import psycopg
import pytest
from rich.console import Console

from tests.benchmarks.http.ingest import BATCH
from tests.benchmarks.postgres import runs
from tests.benchmarks.postgres.durable_appends import POSTGRES, SQLITE, DurableAppends, Sent
from tests.benchmarks.postgres.filling import count_events
from tests.benchmarks.postgres.replicas import ONE, TWO
from tests.benchmarks.postgres.round_trips import SELECT, RoundTrips
from tests.support.postgres_server import PostgresDatabases

TINY = runs.Effort(
    catalogue=300,
    users=4,
    score_rounds=1,
    scores=4,
    append_rounds=1,
    appends=1,
    replica_rounds=1,
    requests=16,
)


def test_a_small_run_measures_every_part(
    postgres: PostgresDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed of the appends is what the database counts, and its databases are dropped."""
    counted: list[int] = []

    def count(url: str) -> int:
        with psycopg.connect(url) as connection:
            rows = connection.execute("SELECT event_key FROM heed.event_ids").fetchall()
        counted.append(len(set(rows)))  # another table, and in this process
        return count_events(url)

    monkeypatch.setattr(runs, "count_events", count)
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    found = runs.run(console, TINY, store=postgres.url(), parts=("score", "appends", "replicas"))
    stores = found["appends"]["stores"]
    assert counted == [found["data"]["events"] + 2 * BATCH]
    assert [stores[name]["events"] for name in (POSTGRES, SQLITE)] == counted * 2
    assert f"{counted[0]:,} events were to be stored" in " ".join(printed.getvalue().split())
    assert set(found["score"]["seconds"]) == {POSTGRES, SQLITE, SELECT}
    cases = {case["question"]: set(case["setups"]) for case in found["replicas"]["cases"]}
    assert cases == {key: {ONE, TWO} for key in ("score-200", "recommend-200", "search")}
    with psycopg.connect(postgres.url()) as connection:
        left = connection.execute("SELECT FROM pg_database WHERE datname LIKE 'heed_bench_%'")
        assert left.fetchall() == []


def test_figures_by_hand() -> None:
    """A difference is counted in round trips of its round, and a rate is one over the time."""
    found = RoundTrips(
        "score-200",
        200,
        {
            POSTGRES: [[0.003, 0.004, 0.009], [0.005]],
            SQLITE: [[0.002, 0.003, 0.003], [0.002]],
            SELECT: [[0.001], [0.002]],
        },
    )
    assert found.difference.median == pytest.approx(1.25)  # of 1 / 1 and 3 / 2
    sent = {POSTGRES: [Sent(5e-5, 1e-5, 2e-5, 3e-6)], SQLITE: [Sent(2.5e-5, 1e-5, 0.0, 3e-6)]}
    appends = DurableAppends(sent, 0, {})
    assert appends.rate(POSTGRES).median == pytest.approx(20_000)
    assert appends.ratio.median == pytest.approx(2.0)
