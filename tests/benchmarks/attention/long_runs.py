"""Lengths and kinds of keys that attention is measured over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from service.histories.crossover import measure as measured_crossover
from tests.benchmarks.attention import long_attention, long_keys, long_report
from tests.benchmarks.attention.long_attention import Case, Material
from tests.benchmarks.harness.tables import stage

_LENGTHS = (100, 1_000, 10_000, 100_000, 1_000_000)
_PEAKED = 100_000  # events over which attention of other spreads is measured
_SPREADS = (2.0, 4.0)  # times as long as the model's queries, or as a spread of 1
_TOP_K_UP_TO = 100_000  # events: clustering more, for a top-k to be found in, takes minutes


def run(
    console: Console,
    data: Path | None,
    encoder: str,
    *,
    most: int,
    targets: Sequence[int],
    rounds: int,
) -> list[Case]:
    """Measure, and show what was found.

    Args:
        console: where to.
        data: whose model and histories; None = drawn keys alone.
        encoder: what its texts were read by.
        most: events of the longest memory.
        targets: how many ask at once.
        rounds: of each timing.

    Raises:
        Invalid: where there is no model.
    """
    crossover = measured_crossover()
    long = None if data is None else long_keys.long_users(data, encoder)
    if long is not None:
        console.print(
            f"{len(long.snapshot.catalogue):,} items, model {long.snapshot.version}, "
            f"longest history {long.longest:,} events",
            style="dim",
        )
    lengths = [n for n in _LENGTHS if n <= most]

    def materials(peaked: bool) -> Iterator[Material]:
        for n in lengths:
            if long is not None and not peaked:
                yield long_keys.repeated(long, n, max(targets))
            if long is not None and (not peaked or n == _PEAKED):
                made = long_keys.distinct(long, n, 100 if peaked else max(targets))
                yield from (
                    [long_keys.sharpened(made, factor) for factor in _SPREADS] if peaked else [made]
                )
            if peaked and n == _PEAKED:
                yield from (long_keys.drawn(n, 100, 0.5 * factor) for factor in (1, 2, 4, 6))
            elif not peaked and long is None:
                yield long_keys.drawn(n, max(targets))

    found: list[Case] = []
    for name, peaked in (("lengths", False), ("spreads", True)):
        count = sum(1 for _ in materials(peaked))
        with stage(console, name) as progress:
            found += long_attention.measure(
                materials(peaked),
                [100] if peaked else targets,
                rounds,
                count=count,
                crossover=crossover,
                top_k_up_to=_TOP_K_UP_TO if not peaked else most,
                progress=progress,
            )
    console.print(
        f"Cells from {crossover.one:,.0f} rows on for one target, {crossover.many:,.0f} for many: "
        "as measured here, now.",
        style="dim",
    )
    long_report.show(console, found)
    return found
