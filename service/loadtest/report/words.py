"""What a load test says in words and in rows of tables, on the screen and on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.loadtest.figures import ALL, OUTSIDE, REST, WAITED, late

STEPS = ("holds", "sent", "% in time", "p50", "p99", "sends late, p99", "errors")
COLUMNS = ("p50", "p95", "p99", "p99.9", "max")
STAGES_NOTE = (
    "Each stage's own percentiles: they do not add up to those of the whole. "
    f"“{REST}” is its total less its stages, “{OUTSIDE}” what the generator waited beyond that "
    f"total, “{WAITED}” the time between due and sent."
)
_EXCEPTIONS = 5  # requests that may be slow, with fewer of which a step of a ramp says little
_FEW = 1_000  # requests below which one in a thousand is none


def described(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was loaded, how, and by what machine, in words."""
    options, has, machine = found["options"], found["data"], found["machine"]
    lengths = has["history_lengths"]
    mix = ", ".join(f"{name} {share:g}" for name, share in found["mix"].items())
    most = f"{lengths['most']:,}" + (" or more" if lengths["most"] >= 1_000 else "")
    return [
        ("server", f"{options['url']}, Heed {has['heed']}, model {has.get('model') or 'unknown'}"),
        ("catalogue", f"{has['items']:,} items; {has['asked_items']:,} of them are asked about"),
        (
            "users",
            f"{has['users']:,}"
            + (f" with {has['events']:,} events" if "events" in has else "")
            + f"; {has['asking_users']:,} of them ask",
        ),
        (
            "their histories",
            f"{lengths['least']:,} to {most} events, median {lengths['median']:,.0f}",
        ),
        (
            "requests",
            (
                f"{mix}; {options['targets']} targets a score, {options['limit']} items a "
                f"recommendation or search; {found['distinct_requests']:,} different ones of each"
            ),
        ),
        (
            "load",
            f"open loop, {options['arrivals']} arrivals, "
            + (f"from {options['rate']:g}" if options["ramp"] else f"{options['rate']:g}")
            + f" a second, {options['duration']:g} s"
            + (" a step" if options["ramp"] else "")
            + f" after {options['warmup']:g} s that do not count, seed {options['seed']}",
        ),
        (
            "generator",
            (
                f"one process, at most {options['connections']:,} connections; "
                f"a request fails after {options['timeout']:g} s"
            ),
        ),
        (
            "its machine",
            (
                f"{machine['processor']}, {machine['cores']} cores, "
                f"{machine['system']}; "
                f"load average {machine['load_average']:.1f} before the run"
            ),
        ),
        (
            "its versions",
            ", ".join(f"{name} {machine[name]}" for name in ("heed", "python")),
        ),
        ("started", found["started"]),
    ]


def verdicts(found: Mapping[str, Any]) -> list[str]:
    """How it ended, whether an objective held, at what rate, and what was written."""
    load, said = found["load"], []
    silence = found["options"]["silence"]
    if found["ended"] == "stopped":
        said.append("Stopped before its end: the figures are of what was sent until then.")
    if found["ended"] == "silent":
        said.append(
            f"The server stopped answering: nothing came back for {silence:g} s. "
            "The figures are of what was sent until then."
        )
    if load["kinds"][ALL]["unfinished"]:
        said.append(f"{load['kinds'][ALL]['unfinished']:,} requests were under way at the end.")
    if "slo" in load:
        slo = load["slo"]
        verb = "holds" if slo["held"] else "does not hold"
        said.append(f"{slo['slo']} {verb}: {100 * slo['within']:.2f} % of all requests were.")
    if "ramp" in found:
        said += [_ramp(found["ramp"]), *_half(found["ramp"])]
    return [*said, *_memory(found.get("memory")), *_cleaning(found.get("cleaning"))]


def sentences(found: Mapping[str, Any]) -> list[str]:
    """What stands below the latencies."""
    load = found["load"]
    lag, flying = load["generator"]["late"], load["in_flight"]
    return [
        (
            f"{load['requests_per_second']:,.1f} requests a second left, "
            f"{load['successes_per_second']:,.1f} were answered with success; those alone have a "
            "latency here."
        ),
        (
            f"In flight: {flying['mean']:.1f} on average, {flying['max']:,} at most, over "
            f"{load['generator']['connections']:,} connections."
        ),
        (
            f"The generator's own sends were late by {milliseconds(lag['p50'])} ms (p50), "
            f"{milliseconds(lag['p99'])} ms (p99), {milliseconds(lag['max'])} ms (max); that is "
            "part of every latency."
        ),
    ]


def warnings(found: Mapping[str, Any]) -> list[str]:
    """Why not to trust the figures blindly."""
    said = []
    load = found["load"]
    generator, latency = load["generator"], load["kinds"][ALL]["latency"]
    if slow := late(generator, latency):
        lag = ", ".join(
            f"{milliseconds(generator['late'][p])} of {milliseconds(latency[p])} ms" for p in slow
        )
        said.append(
            f"the generator was late: at {', '.join(slow)} its own delay is {lag}. Give "
            "it a core of its own or another machine, or lower --rate"
        )
    waited = generator["waited_for_a_connection"]["p99"]
    if waited and latency["p99"] and waited > 0.1 * latency["p99"]:
        said.append(
            f"1 % of requests waited {milliseconds(waited)} ms or longer for a "
            f"connection: {found['options']['connections']:,} (--connections) were busy, or "
            "new ones were opened"
        )
    ramp = found.get("ramp", {"steps": [], "slo_seconds": 0.0})
    lags = [
        (each["rate"], each["late"]["p99"] or 0.0) for each in ramp["steps"] if not each["held"]
    ]
    lags = [(rate, lag) for rate, lag in lags if lag > 0.1 * ramp["slo_seconds"]]
    if lags:
        rates = ", ".join(f"{rate:,.1f}" for rate, _ in lags)
        most = milliseconds(max(lag for _, lag in lags))
        said.append(
            f"at {rates} a second the objective broke with sends up to {most} ms late "
            "(p99): the limit may be the generator's"
        )
    if "ramp" in found:
        # Those that ended early have fewer, and need no more.
        whole = [step["requests"] for step in found["ramp"]["steps"] if step["ended"] == "all sent"]
        few = min(whole, default=_FEW)
        allowed = few * (1 - found["ramp"]["slo_percentile"] / 100)
        if allowed < _EXCEPTIONS:
            said.append(
                f"of a step of {few:,} requests {allowed:.1f} may be slow: chance decides; raise "
                "--duration or --rate"
            )
    if 0 < found["load"]["kinds"][ALL]["successes"] < _FEW:
        said.append(f"fewer than {_FEW:,} answers: p99.9 is about the slowest; load for longer")
    return said


def latency_rows(kinds: Mapping[str, Any]) -> list[Sequence[str]]:
    """A row for each kind, the first for all."""
    rows: list[Sequence[str]] = []
    for name, each in kinds.items():
        row = [name, f"{each['requests']:,}", f"{sum(each['errors'].values()):,}"]
        row += [milliseconds(each["latency"][column]) for column in COLUMNS]
        rows.append(row)
    return rows


def failures(load: Mapping[str, Any]) -> list[Sequence[str]]:
    """A row for each kind and error."""
    return [
        (name, error, f"{count:,}", load["details"].get(f"{name} {error}", ""))
        for name, each in load["kinds"].items()
        if name != ALL
        for error, count in each["errors"].items()
    ]


def stage_rows(stages: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    """A row for each stage, two cells for each kind; the server's first."""
    last = (REST, OUTSIDE, WAITED)
    names = dict.fromkeys(name for each in stages.values() for name in each if name not in last)
    return [
        [name]
        + [
            milliseconds(each[name][p]) if name in each else "–"
            for each in stages.values()
            for p in ("p50", "p99")
        ]
        for name in (*names, *last)
    ]


def step_rows(ramp: Mapping[str, Any]) -> list[Sequence[str]]:
    """A row for each step of a ramp, in the order in which they were made; times in ms."""
    return [
        (
            f"{each['rate']:,.1f}",
            "yes" if each["held"] else "no",
            f"{each['requests']:,}",
            f"{100 * each['within']:.2f}",
            milliseconds(each["latency"]["p50"]),
            milliseconds(each["latency"]["p99"]),
            milliseconds(each["late"]["p99"]),
            counted(each["errors"]),
        )
        for each in ramp["steps"]
    ]


def counted(errors: Mapping[str, int]) -> str:
    """Errors with how often each was."""
    return ", ".join(f"{count:,} × {error}" for error, count in errors.items())


def milliseconds(seconds: float | None) -> str:
    """As a cell has them; what is not known is a dash."""
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


# ------------------------------------------------------------------------------ the parts


def _ramp(ramp: Mapping[str, Any]) -> str:
    if ramp["held"] is None:
        tried = "" if ramp["broke"] is None else f", down to {ramp['broke']:,.1f} a second"
        return f"{ramp['slo']} held at no rate{tried}."
    ended = f"it broke at {ramp['broke']:,.1f}" if ramp["broke"] else "no higher one broke it"
    return f"{ramp['slo']} held up to {ramp['held']:,.1f} requests a second; {ended}."


def _half(ramp: Mapping[str, Any]) -> Sequence[str]:
    """The tail of each kind at half of the rate that held."""
    half = ramp.get("half")
    if half is None:
        return []
    kinds = [
        f"{kind} p50 {milliseconds(each['p50'])} ms, p99 {milliseconds(each['p99'])} ms "
        f"({_times(half['p99_over_p50'][kind])} times)"
        for kind, each in half["kinds"].items()
    ]
    return [f"At half of that, {half['rate']:,.1f} a second: {'; '.join(kinds)}."]


def _memory(found: Mapping[str, Any] | None) -> Sequence[str]:
    if not found:
        return []
    start, third, end = (f"{found[at] / 2**20:,.0f}" for at in ("start", "third", "end"))
    first = f"The server held {start} MiB at the beginning"
    return [f"{first}, {third} after a third of the time and {end} at the end."]


def _cleaning(found: Mapping[str, Any] | None) -> Sequence[str]:
    if not found or not found["events"]:
        return []
    wrote = f"{found['events']:,} events were sent for {found['of']}"
    if found["kept"]:
        return [f"{wrote}; they stay, named loadtest-{found['run']}-…"]
    if not found["left"]:
        return [f"{wrote}, and taken away again."]
    shown = ", ".join(found["left"][:3]) + (", …" if len(found["left"]) > 3 else "")
    return [
        (
            f"{wrote}; {len(found['left']):,} of what was written could not be taken away. "
            f"DELETE {shown} when the server answers (all are in the JSON)."
        )
    ]


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1f}"
