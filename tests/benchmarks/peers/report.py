"""Tables and JSON of the comparison with peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from tests.benchmarks.harness.tables import table
from tests.benchmarks.harness.timing import Spread, ratios, spread
from tests.benchmarks.peers.questions import Quality
from tests.benchmarks.peers.turns import HEED, Case, Peer, verdict


def settings(console: Console, title: str, stated: Mapping[str, str]) -> None:
    """Print the version and settings of each peer."""
    table(console, title, ("", "version and settings"), stated.items(), left=2)


def cases(console: Console, title: str, found: Sequence[Case], caption: str) -> None:
    """Latency and rate of everybody, and how many times as fast Heed is."""
    rows = [
        (
            case.kind,
            f"{case.connections}",
            name,
            *(f"{1e3 * case.percentile(name, p):.2f}" for p in (50, 95, 99)),
            f"{case.rate(name):,.0f}",
            "" if name == HEED else times(case.times(name)),
        )
        for case in found
        for name in case.latencies
    ]
    columns = ("question", "at once", "", "p50 ms", "p95 ms", "p99 ms", "a second", "Heed is")
    table(console, title, columns, rows, left=3, caption=caption)


def quality(console: Console, title: str, found: Mapping[str, Quality]) -> None:
    """Print the quality of each peer's lists."""
    rows = [
        (name, f"{each.hr:.3f} ±{each.errors[0]:.3f}", f"{each.ndcg:.3f} ±{each.errors[1]:.3f}",
         f"{each.cases:,}")
        for name, each in found.items()
    ]  # fmt: skip
    caption = (
        "By the lists answered over HTTP: each user's last event held out, the whole catalogue "
        "ranked, what was seen left out, nobody told when. ± is the standard error."
    )
    table(console, title, ("", "HR@10", "NDCG@10", "cases"), rows, caption=caption)


def everyone(console: Console, rates: Mapping[str, Sequence[float]]) -> None:
    """Lists of all users, users a second."""
    rows = []
    for name, own in rates.items():
        rate = spread(own)
        rows.append(
            (name, f"{rate.median:,.0f} ({rate.low:,.0f}–{rate.high:,.0f})",
             "" if name == HEED else times(ratios(rates[HEED], own)))
        )  # fmt: skip
    caption = (
        "In process and without HTTP; Heed reads histories from its store and writes a file, as "
        "`heed recommend-all` does; the others compute lists in memory."
    )
    columns = ("", "users a second", "Heed is")
    table(console, "The lists of all users in one go", columns, rows, caption=caption)


def recalls(console: Console, found: Mapping[str, float]) -> None:
    """Print the recall of the exact best ten, over HTTP."""
    rows = [(name, f"{share:.3f}") for name, share in found.items()]
    caption = (
        "Of the ten nearest keys by all products, on queries that no effort was chosen on; of "
        f"{HEED}'s own search, of the ten items that it answers when every key is attended."
    )
    table(console, "What of the exact ten is found", ("", "recall@10"), rows, caption=caption)


def indexes(console: Console, title: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """The comparison in one process."""
    rows = []
    for name, each in found.items():
        low, median, high = (each["heed_times_as_fast"][part] for part in ("q25", "median", "q75"))
        one = next(iter(found)) == name
        rows.append(
            (name, each["settings"], each["effort"], f"{each['recall']:.3f}",
             f"{1e3 * each['seconds']['median']:.3f}",
             "" if one else times(Spread(median, low, high)), f"{each['build_seconds']:,.0f} s")
        )  # fmt: skip
    columns = ("", "settings", "effort", "recall@10", "ms a query", "Heed is", "built in")
    caption = (
        "Processor time of one query at a time, on queries that no effort was chosen on. "
        "Quantised or not, each is given what it takes to find enough on the other half."
    )
    table(console, title, columns, rows, left=3, caption=caption)


def slower(console: Console, found: Iterable[str]) -> None:
    """Print where Heed is not the faster one, by how much and why."""
    slower = list(found)
    console.print(
        "Where Heed is slower" if slower else "Heed is slower nowhere here.", style="bold"
    )
    for line in slower:
        console.print(f"- {line}", soft_wrap=True, highlight=False)


def lost(
    found: Sequence[Case],
    peers: Sequence[Peer],
    good: Mapping[str, Quality] | Mapping[str, float] | None = None,
) -> list[str]:
    """A sentence for each question that a peer answers faster than Heed.

    Args:
        found: what was measured.
        peers: who was.
        good: how good each one's answers are, where that is the same for all questions.
    """
    own = {peer.name: peer for peer in peers}
    slower = []
    for case in found:
        for name in case.latencies:
            if name.startswith(HEED) or verdict(case.times(name)) != "slower":
                continue
            by = ratios(case.seconds[HEED], case.seconds[name])
            slower.append(
                f"{case.kind}, {case.connections} at once: {name} is {by.median:.2f} "
                f"({by.low:.2f}–{by.high:.2f}) times as fast{_beside(good, name)}. "
                f"{own[name].why}".rstrip()
            )
    return slower


def times(found: Spread) -> str:
    """Say how many times as fast Heed is, or, below 1, the other."""
    low, median, high = (f"{each:.2f}" if each >= 0.1 else f"{each:.1g}"
                         for each in (found.low, found.median, found.high))  # fmt: skip
    spelt = f"{median} ({low}–{high}) times as fast"
    return spelt if verdict(found) != "slower" else f"{spelt}: SLOWER"


# ------------------------------------------------------------------------------ the parts


def _beside(good: Mapping[str, Quality] | Mapping[str, float] | None, name: str) -> str:
    """The quality of a faster one beside Heed's."""
    if good is None or name not in good:
        return ""
    own, theirs = good[HEED], good[name]
    if isinstance(own, Quality) and isinstance(theirs, Quality):
        return f", with NDCG@10 {theirs.ndcg:.3f} beside {own.ndcg:.3f}"
    return f", with recall@10 {theirs:.3f} beside {own:.3f}"
