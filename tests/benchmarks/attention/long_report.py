"""Tables, sentences and a picture of attention over memories of any length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from models.attention.clustered.clustered_attention import MAX_ERROR
from tests.benchmarks.attention.long_attention import NAMED_K, Case, Off
from tests.benchmarks.harness.tables import table

_DIFFUSE = 1.5  # a standard deviation of scores below which attention is diffuse


def show(console: Console, cases: Sequence[Case]) -> None:
    """All of it."""
    table(
        console,
        "Attention over n events: ours, and torch's fused kernel over every event",
        ("keys", "events", "rows", "T", "fused", "ours", "times as fast", "by"),
        (
            (
                each.name,
                f"{each.events:,}",
                f"{each.rows:,}",
                f"{each.targets:,}",
                _time(each.reference.median),
                _time(each.ours.median),
                f"{each.faster.median:.1f} ({each.faster.low:.1f}–{each.faster.high:.1f})",
                each.path,
            )
            for each in cases
        ),
    )
    table(
        console,
        "How far off: scores in standard deviations over the targets, contexts relative",
        ("keys", "events", "T", "spread", "score", "p99", "context", "p99", "stated", "top 20",
         "scanned"),
        (
            (
                each.name,
                f"{each.events:,}",
                f"{each.targets:,}",
                f"{each.spread:.2f}",
                _share(each.off.score_median),
                _share(each.off.score_p99),
                _share(each.off.context_median),
                _share(each.off.context_p99),
                _share(each.stated),
                f"{each.off.overlap:.3f}",
                f"{each.scanned:,.0f}",
            )
            for each in cases
            if each.path == "cells"
        ),
        caption="Stated: the median of the errors that answers name, at 99 % confidence.",
    )  # fmt: skip
    table(
        console,
        "A softmax over the k nearest rows alone, found by FAISS",
        ("keys", "events", "T", "spread", *(f"k = {k}" for k in NAMED_K), "at our time", "ours",
         "times ours"),
        (
            (
                each.name,
                f"{each.events:,}",
                f"{each.targets:,}",
                f"{each.spread:.2f}",
                *(_top(each, k) for k in NAMED_K),
                "none" if each.equal is None else f"k {each.equal}: {_off(each.top_k[each.equal])}",
                _off(each.off),
                _worse(each),
            )
            for each in cases
            if each.top_k and each.path == "cells"
        ),
        caption="Median relative error of the contexts, and the time of finding and weighing them. "
        "At our time: the largest k that takes no longer than ours.",
    )  # fmt: skip
    for sentence in claims(cases):
        console.print(sentence, highlight=False, soft_wrap=True)


def claims(cases: Sequence[Case]) -> Iterator[str]:
    """Return a sentence for each claim, with the figures of the cases."""
    cells = [each for each in cases if each.path == "cells"]
    pairs, kept = sum(each.pairs for each in cells), sum(each.kept for each in cells)
    if pairs:
        yield (
            f"Within the {_share(MAX_ERROR)} asked for: {kept:,} of {pairs:,} contexts "
            f"of cells ({kept / pairs:.2%})."
        )
    for name in dict.fromkeys(each.name for each in cases):
        own = {
            each.events: each for each in cases if each.name == name and each.targets == 100
        }  # fmt: skip
        if 10**4 in own and 10**6 in own:
            grown = own[10**6].ours.median / own[10**4].ours.median
            yield f"{name}: a million events take {grown:.1f} times as long as ten thousand."
    diffuse = [each for each in cells if each.spread < _DIFFUSE and each.equal is not None]
    worst = min(map(_times, diffuse), default=math.nan)
    if diffuse:
        yield (
            f"A top-k of equal time is at least {worst:.1f} times as far off where scores spread "
            f"less than {_DIFFUSE} ({len(diffuse)} cases)."
        )


def plot(cases: Sequence[Case], path: Path) -> None:
    """Time against length, and error against length, as a PNG.

    Raises ModuleNotFoundError without matplotlib, which the extra `plots` installs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    times, errors = figure.subplots(1, 2)
    hundred = [each for each in cases if each.targets == 100]
    k = max(NAMED_K)
    for name in dict.fromkeys(each.name for each in hundred):
        own = [each for each in hundred if each.name == name]
        if len(own) < 2 and len(hundred) > 1:
            continue  # of one length there is no line
        (line,) = times.plot(
            [each.events for each in own], [1e3 * each.ours.median for each in own], "o-",
            label=f"ours: {name}",
        )  # fmt: skip
        cells = [each for each in own if each.path == "cells"]
        tops = [each for each in own if k in each.top_k]
        for some, off, style, what in (
            (cells, [each.off for each in cells], "o-", "ours"),
            (tops, [each.top_k[k] for each in tops], "x--", f"the {k} nearest alone"),
        ):
            if some:
                errors.plot(
                    [each.events for each in some],
                    [100 * found.context_median for found in off],
                    style, color=line.get_color(), label=f"{what}: {name}",
                )  # fmt: skip
    longest = dict.fromkeys(each.events for each in hundred)
    fused = {each.events: each.reference.median for each in hundred}
    times.plot(
        list(longest), [1e3 * fused[n] for n in longest], "k--", label="fused kernel, every event"
    )
    times.set(xscale="log", yscale="log", xlabel="events", ylabel="ms for 100 targets")
    errors.set(xscale="log", yscale="log", xlabel="events", ylabel="median error of contexts, %")
    for axes in (times, errors):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _times(each: Case) -> float:
    if each.equal is None:
        return math.nan
    ours = each.off.context_median
    return each.top_k[each.equal].context_median / ours if ours else math.inf


def _worse(each: Case) -> str:
    return "" if each.equal is None else f"{_times(each):.1f}"


def _top(each: Case, k: int) -> str:
    if k not in each.top_k:
        return ""
    return f"{_off(each.top_k[k])}, {_time(each.top_k_seconds[k])}"


def _off(found: Off) -> str:
    return _share(found.context_median)


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2%}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
