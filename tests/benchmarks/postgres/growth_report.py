"""Tables of what grows with the number of events in PostgreSQL, and what does not."""

from __future__ import annotations

from rich.console import Console

from tests.benchmarks.harness.tables import ms, ratio, table
from tests.benchmarks.postgres.growth import BATCH, IDS, NEWEST, READS, Calls, Grown, Growth

TARGET = 1.5  # times the smallest database's latency


def shown(console: Console, found: Growth) -> None:
    """Print reads, sizes and appends."""
    _reads(console, found)
    _sizes(console, found)
    _appends(console, found)


def _reads(console: Console, found: Growth) -> None:
    rows = []
    for read in READS:
        for each in found.sizes:
            calls = each.reads[read]
            is_last = len(found.sizes) > 1 and each is found.sizes[-1]
            medians, tail = found.ratio(read)
            rows.append(
                (
                    read,
                    f"{each.loaded.events:,}",
                    ms(calls.percentile(50)),
                    ms(calls.percentile(99)),
                    *((ratio(medians), f"{tail:.2f}") if is_last else ("", "")),
                    f"{1e6 * calls.client / calls.count:.0f}",
                    f"{1e6 * calls.server / calls.count:.0f}",
                )
            )
    table(
        console,
        "Reads of one user, databases in turns: ms, and µs of processor time",
        ("read", "events", "p50", "p99", "p50 ratio", "p99 ratio", "client CPU", "server CPU"),
        rows,
        caption=f"Ratios: to the smallest database, p50 round by round; wanted: {TARGET} at most. "
        f"{found.sizes[0].reads[READS[0]].count:,} reads each, of users drawn anew. "
        f"Newest {NEWEST}: a page of the history of users who have that many, with ids. History "
        f"of {NEWEST}: whole, as a question reads it, of users with 150 to 250 events.",
    )


def _sizes(console: Console, found: Growth) -> None:
    table(
        console,
        "Bytes on disk after loading: tables and indexes",
        (
            *("events", "users", "items", "an event", "a user", "an item", "all"),
            *("load, events/s", "CPU"),
        ),
        (
            (
                f"{each.loaded.events:,}",
                f"{each.loaded.users:,}",
                f"{each.loaded.items:,}",
                _two(each, each.loaded.events, "events", "event_ids"),
                _two(each, each.loaded.users, "users"),
                _two(each, each.loaded.items, "items"),
                f"{sum(map(sum, each.tables.values())) / 1e6:,.0f} MB",
                f"{each.loaded.events / each.loaded.seconds:,.0f}",
                " + ".join(
                    f"{1e6 * seconds / each.loaded.events:.0f}"
                    for seconds in (each.loaded.client_seconds, each.loaded.server_seconds)
                ),
            )
            for each in found.sizes
        ),
        caption="Table + indexes. Of an event: the event and its id, a random UUID; of a user: "
        "without a profile; of an item: with a description of 20 words, without an embedding. CPU: "
        "µs an event of client + server, loading user by user as heed copy does.",
    )


def _appends(console: Console, found: Growth) -> None:
    rows = []
    for name in IDS:
        for each in found.sizes:
            calls = each.appends[name]
            rows.append(
                (
                    name,
                    f"{each.loaded.events:,}",
                    ms(calls.percentile(50)),
                    ms(calls.percentile(99)),
                    f"{BATCH / calls.percentile(50):,.0f}",
                    f"{_of_event(calls, calls.client):.0f}",
                    f"{_of_event(calls, calls.server):.0f}",
                    f"{calls.wal / (calls.count * BATCH):,.0f}",
                )
            )
    counts = "; ".join(
        f"{each.counted:,} counted of {each.expected:,} acknowledged" for each in found.sizes
    )
    table(
        console,
        f"Durable appends of {BATCH:,} events, one after another, databases in turns",
        (
            *("event ids", "events", "p50 ms", "p99 ms", "events/s"),
            *("client µs", "server µs", "WAL bytes"),
        ),
        rows,
        caption="Processor time and write-ahead log of an event. The first change of a page "
        "after a checkpoint writes all of it to the log: this was measured right after one, the "
        f"dearest moment. In the end: {counts}.",
    )


def _two(found: Grown, count: int, *tables: str) -> str:
    own, indexes = (sum(found.tables[name][part] for name in tables) / count for part in (0, 1))
    return f"{own:.0f} + {indexes:.0f}"


def _of_event(calls: Calls, seconds: float) -> float:
    return 1e6 * seconds / (calls.count * BATCH)
