"""Plots as inline SVG, whose colours are those of the page that they stand in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 26, 12, 46
COLOURS = 8  # that the page has, .c0 to .c7; .s1 are paler ones
Scale = Literal["linear", "log", "tail"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot; what is not finite, or not positive on a log scale, is left out."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """What one axis says and how it is spaced; `tail`: percentiles, by what is beyond them."""

    title: str
    scale: Scale = "linear"
    least: float | None = None  # the axis reaches at least down to here
    most: float | None = None  # and up to here


def plot(title: str, lines: Sequence[Line], x: Axis, y: Axis, note: str = "") -> str:
    """A figure with axes, a legend and a caption; nothing where there are no points."""
    kept = [
        (line, [p for p in line.points if _shows(p[0], x) and _shows(p[1], y)]) for line in lines
    ]
    kept = [(line, points) for line, points in kept if points]
    if not kept:
        return ""
    across, x_ticks = _spaced(
        [p[0] for _, points in kept for p in points], x, _LEFT, _WIDTH - _RIGHT
    )
    up, y_ticks = _spaced([p[1] for _, points in kept for p in points], y, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for value, text in y_ticks:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(value):.1f}" '
            f'y2="{up(value):.1f}"/><text x="{_LEFT - 8}" y="{up(value) + 4:.1f}" '
            f'text-anchor="end">{text}</text>'
        )
    for value, text in x_ticks:
        parts.append(
            f'<line class="grid" x1="{across(value):.1f}" x2="{across(value):.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"/><text x="{across(value):.1f}" '
            f'y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{text}</text>'
        )
    for line, points in kept:
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in points)
        dashed = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<polyline class="c{line.colour}"{dashed} points="{path}"/>')
        if line.dots or len(points) == 1:
            parts += [
                f'<circle class="c{line.colour}" cx="{across(a):.1f}" cy="{up(b):.1f}" r="3.5"/>'
                for a, b in points
            ]
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x.title)}</text>'
        f'<text class="axis" transform="rotate(-90 14 {middle})" x="14" y="{middle}" '
        f'text-anchor="middle">{escape(y.title)}</text>'
    )
    keys = [(line.name, line.colour, line.dashed) for line, _ in kept]
    return _figure(title, _HEIGHT, parts, keys, note)


def stacks(
    title: str,
    rows: Sequence[tuple[str, Sequence[float]]],
    names: Sequence[str],
    unit: str,
    note: str = "",
) -> str:
    """Bars that lie, each made of parts that have names; nothing where all are 0."""
    most = max((sum(values) for _, values in rows), default=0.0)
    if most <= 0:
        return ""
    left, bar, room = 92, 22, 34
    height = _TOP + room * len(rows) + _BOTTOM
    across, ticks = _spaced([0.0, most], Axis(unit), left, _WIDTH - _RIGHT)
    parts = [
        f'<line class="grid" x1="{across(value):.1f}" x2="{across(value):.1f}" y1="{_TOP}" '
        f'y2="{height - _BOTTOM}"/><text x="{across(value):.1f}" y="{height - _BOTTOM + 18}" '
        f'text-anchor="middle">{text}</text>'
        for value, text in ticks
    ]
    for number, (label, values) in enumerate(rows):
        top = _TOP + room * number + (room - bar) / 2
        parts.append(
            f'<text x="{left - 8}" y="{top + bar / 2 + 4}" text-anchor="end">{escape(label)}</text>'
        )
        at = 0.0
        for part, value in enumerate(values):
            width = across(at + value) - across(at)
            if width > 0:
                parts.append(
                    f'<rect class="c{part % COLOURS} s{part // COLOURS}" x="{across(at):.1f}" '
                    f'y="{top}" width="{width:.1f}" height="{bar}"><title>{escape(names[part])}: '
                    f"{value:.2f} {escape(unit)}</title></rect>"
                )
            at += value
    parts.append(
        f'<text class="axis" x="{(left + _WIDTH - _RIGHT) / 2}" y="{height - 6}" '
        f'text-anchor="middle">{escape(unit)}</text>'
    )
    there = [n for n in range(len(names)) if any(values[n] > 0 for _, values in rows)]
    return _figure(title, height, parts, [(names[n], n, False) for n in there], note)


# ------------------------------------------------------------------------------ the parts


def _figure(
    title: str,
    height: float,
    parts: Sequence[str],
    keys: Sequence[tuple[str, int, bool]],
    note: str,
) -> str:
    legend = "".join(
        f'<li><svg width="22" height="10" aria-hidden="true"><line class="c{colour % COLOURS} '
        f's{colour // COLOURS}" x1="0" x2="22" y1="5" y2="5"'
        f"{' stroke-dasharray=' + chr(34) + '6 4' + chr(34) if dashed else ''}/></svg> "
        f"{escape(name)}</li>"
        for name, colour, dashed in keys
    )
    caption = f"<p>{escape(note)}</p>" if note else ""
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f'{"".join(parts)}</svg><ul class="legend">{legend}</ul>{caption}</figure>\n'
    )


def _shows(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (axis.scale != "log" or value > 0)


def _spaced(
    values: Sequence[float], axis: Axis, start: float, end: float
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Where a value lies between two pixels, and what to write where."""
    low = min([*values, *([] if axis.least is None else [axis.least])])
    high = max([*values, *([] if axis.most is None else [axis.most])])
    if axis.scale == "tail":
        span = max(_tail(high), 1.0)
        ticks = [p for p in (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999) if _tail(p) <= span + 1e-9]
        return lambda value: start + (end - start) * _tail(value) / span, [
            (p, f"p{p:g}") for p in ticks
        ]
    if axis.scale == "log":
        steps = [m * 10.0**e for e in range(-4, 9) for m in (1, 2, 5)]
        bottom = max((s for s in steps if s <= low * 1.0001), default=low)
        top = min((s for s in steps if s >= high * 0.9999 and s > bottom), default=high * 10)
        shown = [s for s in steps if bottom <= s <= top]
        if len(shown) > 8:
            shown = [s for s in shown if f"{s:e}"[0] == "1"]
        span = math.log(top / bottom)
        return lambda value: start + (end - start) * math.log(value / bottom) / span, [
            (s, f"{s:,g}") for s in shown
        ]
    low = min(0.0, low)
    step = _step((high - low) or 1.0)
    top = low + step * math.ceil((high - low) / step - 1e-9) if high > low else low + step
    found = np.arange(low, top + step / 2, step).tolist()
    return lambda value: start + (end - start) * (value - low) / (top - low), [
        (value, f"{round(value, 9):,g}") for value in found
    ]


def _tail(percent: float) -> float:
    """Each nine as wide as the one before."""
    return -math.log10(max(1 - percent / 100, 1e-9))


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten, some five of which make the span."""
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1.0, 2.0, 5.0) if rough <= m * power), 10 * power)
