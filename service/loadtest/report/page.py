"""A load test as one HTML file, which needs no network: tables, and plots as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from service.loadtest.figures import ALL
from service.loadtest.report.charts import COLOURS, Axis, Line, plot, stacks
from service.loadtest.report.words import (
    COLUMNS,
    STAGES_NOTE,
    STEPS,
    described,
    failures,
    latency_rows,
    sentences,
    stage_rows,
    step_rows,
    verdicts,
)

_STYLE = """
:root { color-scheme: light dark; --ground: #fbfbfa; --card: #fff; --ink: #1b1d22; --faint: #5b616e;
  --line: #d9dce3; --bad: #a3162a; --good: #1c6b34; --warn: #fff3d1;
  --c0: #2546c8; --c1: #c2410c; --c2: #0f766e; --c3: #8b1fa8; --c4: #a16207; --c5: #64748b;
  --c6: #d0478f; --c7: #4d7c0f; }
@media (prefers-color-scheme: dark) { :root { --ground: #15171c; --card: #1e2128; --ink: #eceef3;
  --faint: #a9b0bf; --line: #3a3f4b; --bad: #ff8f9e; --good: #7fd99a; --warn: #4a3d12;
  --c0: #9db2ff; --c1: #ff9d6b; --c2: #4fd1c0; --c3: #e29bf5; --c4: #e3c04f; --c5: #a5b0c2;
  --c6: #ff8ec5; --c7: #b0dd6a; } }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 62rem; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.says { font-size: 1.05rem; margin: .2rem 0; } .note { color: var(--faint); font-size: .9rem; }
.warning { background: var(--warn); padding: .5rem .8rem; border-radius: .4rem; margin: .4rem 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
.words th, .words td, th:first-child, td:first-child { text-align: left; }
.words td { vertical-align: top; }
.words td { overflow-wrap: anywhere; } td:first-child { white-space: nowrap; }
tbody tr:first-child.all td { font-weight: 700; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; } .plots > figure { min-width: 0; }
figure { margin: 0; padding: .8rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; } figcaption { font-weight: 600; margin-bottom: .3rem; }
figure > svg { width: 100%; height: auto; display: block; } figure p { margin: .3rem 0 0;
  color: var(--faint); font-size: .85rem; }
svg text { fill: var(--faint); font-size: 13px; } svg text.axis { fill: var(--ink); }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 2; } .legend line {
  stroke-width: 4; } .legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem;
  margin: .3rem 0 0; padding: 0; font-size: .85rem; }
.s1 { opacity: .45; }
""" + "\n".join(
    f"polyline.c{n}, line.c{n} {{ stroke: var(--c{n}); }} "
    f"rect.c{n}, circle.c{n} {{ fill: var(--c{n}); }}"
    for n in range(COLOURS)
)


def drawn(found: Mapping[str, Any]) -> str:
    """The page of what `run` returned."""
    load = found["load"]
    title = f"Load test of {found['options']['url']}"
    kinds = load["kinds"]
    plots = [
        _over_time(load),
        _tails(load),
        _flow(load),
        _ramp(found),
        _stages(load, "p50", "Where the time of a typical request went"),
        _stages(load, "p99", "The slow end of each stage"),
    ]
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="says">{escape(line)}</p>' for line in verdicts(found)),
        *(f'<p class="warning">Warning: {escape(line)}.</p>' for line in found["warnings"]),
        "<h2>Latency in ms, from when each request was due to its whole answer</h2>",
        _table(
            ["request", "sent", "failed", *COLUMNS],
            latency_rows(load["kinds"]),
            mark=ALL in kinds,
        ),
        f'<p class="note">{escape(" ".join(sentences(found)))}</p>',
    ]
    if "ramp" in found:
        columns = ["requests a second", *STEPS]
        parts += ["<h2>The ramp, step by step</h2>", _table(columns, step_rows(found["ramp"]))]
    if failed := failures(load):
        columns = ["request", "status or error", "times", "the first answer"]
        parts += ["<h2>What failed</h2>", _table(columns, failed, words=True)]
    parts.append(f'<h2>Plots</h2><div class="plots">{"".join(plots)}</div>')
    if load["stages"]:
        columns = ["stage", *(f"{kind} {p}" for kind in load["stages"] for p in ("p50", "p99"))]
        parts += [
            "<h2>Where the time went, in ms</h2>",
            _table(columns, stage_rows(load["stages"])),
            f'<p class="note">{escape(STAGES_NOTE)}</p>',
        ]
    parts += ["<h2>What was loaded, and by what</h2>", _table([], described(found), words=True)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


# ------------------------------------------------------------------------------ the parts


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: bool = False,
    mark: bool = False,
) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr{' class=all' if mark and not number else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    style = ' class="words"' if words else ""
    return f'<div class="wide"><table{style}>{top}<tbody>{body}</tbody></table></div>'


def _over_time(load: Mapping[str, Any]) -> str:
    lines = [
        Line(
            name,
            [
                (each["at"], 1e3 * each["latency"][name])
                for each in load["timeline"]
                if each["latency"][name] is not None
            ],
            colour,
        )
        for colour, name in enumerate(("p50", "p95", "p99", "max"))
    ]
    note = "By when requests were due: those that waited behind a stall stand where they waited."
    x, y = Axis("seconds after the warm-up"), Axis("latency, ms", "log")
    return plot("Latency over time", lines, x, y, note)


def _tails(load: Mapping[str, Any]) -> str:
    lines = [
        Line(name, [(p, 1e3 * value) for p, value in curve], colour)
        for colour, (name, curve) in enumerate(load["curves"].items())
    ]
    x, y = Axis("percentile", "tail"), Axis("latency, ms", "log")
    return plot("Latency by percentile", lines, x, y)


def _flow(load: Mapping[str, Any]) -> str:
    # The last part may be too short to say a rate.
    parts = [each for each in load["timeline"] if each["seconds"] > 0.5] or load["timeline"][:-1]
    lines = [
        Line("requests a second", [(e["at"], e["requests"] / e["seconds"]) for e in parts], 0),
        Line("failures a second", [(e["at"], e["failures"] / e["seconds"]) for e in parts], 1),
        Line("in flight", [(each["at"], each["in_flight"]) for each in parts], 2),
    ]
    return plot("Requests", lines, Axis("seconds after the warm-up"), Axis("requests", least=0.0))


def _ramp(found: Mapping[str, Any]) -> str:
    if "ramp" not in found:
        return ""
    steps = sorted(found["ramp"]["steps"], key=lambda step: step["rate"])
    points = [(step["rate"], 100 * (1 - step["within"])) for step in steps]
    lines = [Line("Heed", points, 0, dots=True)]
    allowed = 100 - found["ramp"]["slo_percentile"]
    rates = [rate for rate, _ in points]
    lines.append(Line("allowed", [(min(rates), allowed), (max(rates), allowed)], 5, dashed=True))
    slow = f"% failed or slower than {1e3 * found['ramp']['slo_seconds']:g} ms"
    note = "A step ends as soon as it has broken the objective for certain."
    x, y = Axis("requests a second", "log"), Axis(slow, least=0.0)
    return plot("The ramp", lines, x, y, note)


def _stages(load: Mapping[str, Any], p: str, title: str) -> str:
    stages = load["stages"]
    names = [row[0] for row in stage_rows(stages)]
    rows = [
        (kind, [1e3 * each.get(name, {p: 0.0})[p] for name in names])
        for kind, each in stages.items()
    ]
    note = f"The {p} of each stage side by side; they do not add up to that of the whole."
    return stacks(title, rows, names, f"{p} of each stage, ms", note)
