"""Tables of requests over HTTP beside the floors and the job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console

from tests.benchmarks.harness.tables import ms, ratio, table
from tests.benchmarks.http.latency import WORKING, Case
from tests.benchmarks.workload.questions import LIMIT, TARGETS


def shown(console: Console, found: Sequence[Case]) -> None:
    """Questions over HTTP."""
    table(
        console,
        f"Questions over HTTP, closed loop: score {TARGETS} targets, recommend and search {LIMIT}; "
        "milliseconds",
        (
            "question",
            "at once",
            "p50",
            "p95",
            "p99",
            "req/s",
            "core ms",
            "floor p50",
            "p99",
            "ratio",
        ),
        (
            (
                each.question,
                f"{each.connections}",
                *(ms(each.percentile("heed", p)) for p in (50, 95, 99)),
                f"{each.rate('heed'):.0f}",
                "n/a" if each.processor["heed"] is None else ms(each.processor["heed"]),
                *(ms(each.percentile("plain", p)) for p in (50, 99)),
                ratio(each.ratio("plain")),
            )
            for each in found
        ),
        caption="The number in a question's name is the length of the history. The floor is a bare "
        "FastAPI app that answers the same bytes; it writes them with orjson, as Heed does. "
        f"{sum(each.failed for each in found)} requests failed.",
    )
    table(
        console,
        "What the service adds: time for a request, in milliseconds, beside floor and job together",
        (
            "question",
            "at once",
            "Heed",
            "typed floor",
            "job",
            "ratio to both",
            "floor at work",
            "ratio",
        ),
        (
            (
                each.question,
                f"{each.connections}",
                ms(each.percentile("heed", 50) / each.connections),
                ms(each.percentile("typed", 50) / each.connections),
                ms(float(np.median(each.alone))),
                ratio(each.added("typed")),
                *(
                    (
                        ms(each.percentile(WORKING, 50) / each.connections),
                        ratio(each.ratio(WORKING)),
                    )
                    if WORKING in each.loads
                    else ("n/a", "n/a")
                ),
            )
            for each in found
        ),
        caption="Time for a request: the median latency over the connections. The typed floor "
        "answers through its response model, as FastAPI's tutorial does. The job is what is "
        "computed, in this process and in turns with the requests; a score's memory is in place. "
        "The floor at work also does the job for each request: what it takes over both, no service "
        "saves, as each part pushes the others out of the caches.",
    )
    table(
        console,
        "Where Heed says the time of one question went (Server-Timing, medians, ms)",
        ("question", *(names := list(found[0].stages()))),
        (
            (each.question, *(ms(each.stages().get(name, 0.0)) for name in names))
            for each in found
            if each.connections == 1
        ),
    )
