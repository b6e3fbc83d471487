"""Lengths and kinds of keys that attention is measured over, and the tables of what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from models.attention.attend import DEFAULT_K, MAX_ERROR
from models.history.long_history import LISTS_FROM
from tests.benchmarks.attention import long_keys
from tests.benchmarks.attention.long_attention import (
    MANY_TARGETS,
    Case,
    Material,
    measure,
    measure_crossover,
)
from tests.benchmarks.harness.tables import ratio, seconds, stage, table

_LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
_PEAKED = 100_000  # rows over which attention of other spreads is measured
_FACTORS = (2.0, 4.0, 8.0)  # times as long as the model's queries
_SPREADS = (0.5, 1.0, 2.0, 3.0)  # of scores of drawn keys
_CROSSING = 16_384  # rows that the crossover is measured over


def run(console: Console, data: Path | None, encoder: str, *, most: int, rounds: int) -> list[Case]:
    """Measure attention over memories of up to `most` rows, and print what was found.

    Args:
        console: for progress and tables.
        data: a directory whose model and histories are used; None = drawn keys only.
        encoder: the text encoder of its model.
        most: events of the longest memory.
        rounds: of each timing.

    Raises:
        Invalid: when `data` has no model or no events.
    """
    made: list[Callable[[], Material]] = []
    crossing = partial(long_keys.drawn, _CROSSING, MANY_TARGETS, 0.1)
    if data is not None:
        long = long_keys.long_users(data, encoder)
        console.print(
            f"{len(long.snapshot.catalogue):,} items, model {long.snapshot.version}, "
            f"longest history {long.longest:,} events",
            style="dim",
        )
        crossing = partial(long_keys.distinct, long, _CROSSING, MANY_TARGETS)
        for make in (long_keys.repeated, long_keys.distinct):
            made += [partial(make, long, n, MANY_TARGETS) for n in _LENGTHS if n <= most]
        made += [
            partial(long_keys.distinct, long, min(most, _PEAKED), MANY_TARGETS, factor)
            for factor in _FACTORS
        ]
    made += [
        partial(long_keys.drawn, min(most, _PEAKED), MANY_TARGETS, spread) for spread in _SPREADS
    ]
    one, many = measure_crossover(crossing(), rounds)
    with stage(console, "attention") as progress:
        found = measure((make() for make in made), rounds, count=len(made), progress=progress)
    show(console, found)
    console.print(
        f"Lists take the time of every row at {one:,.0f} rows for one target and at "
        f"{many:,.0f} for {MANY_TARGETS}; Heed uses them from {LISTS_FROM:,} on.",
        highlight=False,
        soft_wrap=True,
    )
    return found


def show(console: Console, cases: Sequence[Case]) -> None:
    """Print the tables and what they sum to."""
    table(
        console,
        "Attention over n events, beside torch's fused kernel over every event",
        ("keys", "events", "rows", "T", "way", "fused", "time", "times as fast", "build",
         "bytes/row"),
        (
            (
                each.name,
                f"{each.events:,}",
                f"{each.rows:,}",
                f"{each.targets:,}",
                each.way,
                seconds(each.fused.median),
                seconds(each.seconds.median),
                ratio(each.ratio),
                seconds(each.build) if each.build else "",
                f"{each.held:.0f}" if each.held else "",
            )
            for each in cases
        ),
        caption=f"A top-k is the {DEFAULT_K} rows of largest score that FAISS finds, with their "
        "mass, for which every row is attended too. Times to build are the processor's.",
    )  # fmt: skip
    table(
        console,
        "Errors of contexts, relative to their length, against float64",
        ("keys", "events", "T", "way", "stated", "max", "true", "p99", "max",
         f"within {MAX_ERROR:.0%}", "within stated", "rows scanned", "mass"),
        (
            (
                each.name,
                f"{each.events:,}",
                f"{each.targets:,}",
                each.way,
                *(_percent(x) for x in each.stated or (None, None)),
                *(_percent(x) for x in each.error),
                f"{each.within_asked:.2%}",
                "" if each.stated is None else f"{each.within_stated:.2%}",
                f"{each.scanned:,.0f}",
                f"{each.mass:.3f}",
            )
            for each in cases
            if each.way != "every row"
        ),
        caption="An answer states its error at 99 % confidence.",
    )  # fmt: skip
    for sentence in claims(cases):
        console.print(sentence, highlight=False, soft_wrap=True)


def claims(cases: Sequence[Case]) -> Iterator[str]:
    """Return a sentence for each claim, with the figures of the cases."""
    lists = [each for each in cases if each.way == "lists"]
    if lists:
        slowest = min(lists, key=lambda each: each.ratio.median)
        contexts = sum(each.targets for each in lists)
        kept = sum(each.within_asked * each.targets for each in lists) / contexts
        true = sum(each.within_stated * each.targets for each in lists) / contexts
        yield (
            f"By lists, {kept:.2%} of the contexts are within {MAX_ERROR:.0%}, and {true:.2%} "
            f"within the error stated. The slowest takes {1 / slowest.ratio.median:.2f} times the "
            f"fused kernel's time ({slowest.name}, {slowest.targets} targets)."
        )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2g} %"
