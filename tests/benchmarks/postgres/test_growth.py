"""`make bench ARGS=postgres`, by the number of events: figures agree with the server's own."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import psycopg
import pytest
from rich.console import Console

from service.stores.postgres.store import PostgresStore
from tests.benchmarks.harness.processes import Cores
from tests.benchmarks.postgres import growth_report
from tests.benchmarks.postgres.filling import Loaded, load, user_id
from tests.benchmarks.postgres.growth import BATCH, IDS, READS, Calls, Grown, Growth, measure
from tests.benchmarks.postgres.measured_server import measured_server
from tests.support.postgres_server import PostgresDatabases


def _one(url: str, query: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_a_small_run_measures_databases_of_both_sizes(postgres: PostgresDatabases) -> None:
    """Sizes, counts and histories are those that the server and the store give by themselves."""
    with measured_server(postgres.url(), Cores(None, None)) as server:

        async def run() -> tuple[Growth, int, int]:
            databases = [
                await load(server, events, items=120, mean=20, progress=lambda *_: None)
                for events in (1_500, 4_000)
            ]
            url = databases[1].url
            events = _one(
                url,
                "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('heed.events')",
            )
            ids = _one(url, "SELECT pg_total_relation_size('heed.event_ids')")
            found = await measure(server, databases, rounds=2, reads=3, batches=1, warm=3)
            store = PostgresStore(databases[0].url)
            lengths = [len((await store.history(user_id(n))).item_ids) for n in range(75)]
            await store.close()
            return found, events + ids, sum(lengths)

        found, bytes_of_events, read = asyncio.run(run())
        counted = [
            _one(each.loaded.url, "SELECT count(*) FROM heed.events") for each in found.sizes
        ]
    assert counted == [1_500 + 6 * BATCH, 4_000 + 6 * BATCH]
    assert [each.counted for each in found.sizes] == counted
    assert [each.expected for each in found.sizes] == counted
    assert found.sizes[0].loaded.lengths.sum() == 1_500
    assert read == counted[0]
    assert found.sizes[1].bytes_each(1, "events", "event_ids") == bytes_of_events
    for each in found.sizes:
        assert {name: calls.count for name, calls in each.reads.items()} == dict.fromkeys(READS, 6)
        assert {name: calls.count for name, calls in each.appends.items()} == dict.fromkeys(IDS, 2)
        assert all(calls.wal > BATCH * 100 for calls in each.appends.values())
    printed = io.StringIO()
    growth_report.shown(Console(file=printed, width=200), found)
    words = " ".join(printed.getvalue().split())
    for count in counted:
        assert f"{count:,} counted of {count:,} acknowledged" in words


def test_ratios_by_hand() -> None:
    """The ratio of medians is the median over rounds, that of the tails is of all latencies."""

    def grown(*rounds: list[float]) -> Grown:
        calls = dict.fromkeys(READS, Calls([*rounds]))
        return Grown(Loaded("", 10, 1, np.array([10]), 1.0, 1.0, 1.0), {}, calls, {}, 0, 10)

    found = Growth([grown([1, 2, 3], [2, 2, 2]), grown([4, 4, 4], [2, 2, 8])])
    medians, tail = found.ratio(READS[0])
    assert medians.median == 1.5  # of 4 / 2 and 2 / 2
    assert tail == pytest.approx(7.8 / 2.95)  # the 99th percentiles of six
