"""Figures, warnings and charts of a load test, on recordings with known values."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.domain.errors import Invalid
from service.lab.load_options import Options, Slo, parse_headers, parse_mix, parse_url, read_key
from service.lab.load_report import FRAME, draw_charts, render_page, verdict, warnings
from service.lab.open_loop import (
    ALL,
    FACTOR,
    LEAST,
    NEAR,
    OUTSIDE,
    PREPARED,
    REST,
    WAITED,
    Recording,
    Schedule,
    draw_schedule,
    find_highest_rate,
    parse_server_timing,
    percentiles,
    summarize,
)

OPTIONS = Options("http://heed", warmup=0.5)


def record(
    latencies: Sequence[float] | NDArray[np.float64],
    *,
    late: float = 0.0,
    kinds: Sequence[str] = ("a",),
    kind: Sequence[int] | None = None,
    status: Sequence[int] | None = None,
    timing: str = "",
    warmup: float = 0.0,
) -> Recording:
    """Build a recording of requests 0.1 s apart with the given latencies; status 0 is a refusal."""
    n = len(latencies)
    due = 0.1 * np.arange(n, dtype=np.float64)
    found = np.array([200] * n if status is None else status, dtype=np.int16)
    indexes = np.array(kind or [0] * n, dtype=np.int8)
    recording = Recording.empty(Schedule(kinds, due, indexes, np.zeros(n, dtype=np.int64), warmup))
    recording.woke[:] = recording.sent[:] = due + late
    recording.done[:] = due + np.asarray(latencies, dtype=np.float64)
    recording.status[:] = found
    recording.server_timing[:] = [timing] * n
    recording.failures |= dict.fromkeys(np.flatnonzero(found == 0).tolist(), "refused")
    return recording


# ------------------------------------------------------------------------------ schedule


def test_poisson_arrivals_have_exponential_gaps_at_the_rate() -> None:
    """Mean and standard deviation of the gaps are 1/rate, and they are as often short as e says."""
    due = draw_schedule(200.0, replace(OPTIONS, duration=499.5)).due
    gaps = np.diff(due)
    assert len(due) == pytest.approx(100_000, rel=0.02)  # six standard deviations
    assert (gaps >= 0).all()
    assert due[-1] < 500.0
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 200, rel=0.03)
    assert (gaps < 1 / 200).mean() == pytest.approx(1 - math.exp(-1), abs=0.01)


def test_more_requests_than_memory_holds_are_refused() -> None:
    with pytest.raises(Invalid, match="--rate"):
        draw_schedule(1e6, replace(OPTIONS, duration=1e6))


def test_kinds_are_drawn_in_proportion() -> None:
    drawn = draw_schedule(1_000.0, replace(OPTIONS, duration=99.5))
    assert drawn.kinds == ["score", "recommend", "search", "events"]
    counts = Counter(drawn.kind.tolist())
    for kind, share in enumerate((4, 2, 3, 1)):
        assert counts[kind] / len(drawn.kind) == pytest.approx(share / 10, abs=0.01)
    assert set(drawn.pick.tolist()) == set(range(PREPARED))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sing=1", "'sing' is no kind"),
        ("score=1,score=2", "twice"),
        ("score=much", "share of score"),
        ("score=-1", "share of score"),
        ("score=nan", "share of score"),
        ("score=0", "has no request"),
        ("", "is no kind"),
    ],
)
def test_a_mix_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        parse_mix(text)


def test_addresses_and_headers_are_read_or_refused() -> None:
    assert parse_url("http://[::1]:81/heed/") == "http://[::1]:81/heed"
    assert parse_url("https://heed.example") == "https://heed.example"
    for wrong in (
        "heed.example:80",
        "ftp://a",
        "http://",
        "http://a:port",
        "http://u@a",
        "http://a?b",
    ):
        with pytest.raises(Invalid, match="--url"):
            parse_url(wrong)
    given = ["Authorization: Bearer a:b", "X-Tenant:7"]
    assert parse_headers(given) == [("Authorization", "Bearer a:b"), ("X-Tenant", "7")]
    for bad in ("s3cret", "A B: s3cret", "A: s3cret\r\nB: c"):
        with pytest.raises(Invalid, match="--header") as error:
            parse_headers([bad])
        assert "s3cret" not in str(error.value)


def test_a_key_is_read_from_a_file_or_the_environment(tmp_path: Path) -> None:
    """The file wins over the variable, and what is no key is refused without repeating it."""
    path = tmp_path / "key"
    path.write_text("heed_s3cret\n")
    assert read_key(path, "other") == [("Authorization", "Bearer heed_s3cret")]
    assert read_key(None, "other") == [("Authorization", "Bearer other")]
    assert read_key(None, None) == read_key(None, "") == []
    path.write_text("heed_s3cret\nand more")
    for file, source in ((path, "--key-file"), (tmp_path / "none", "--key-file"), (None, "HEED_")):
        with pytest.raises(Invalid, match=source) as error:
            read_key(file, "two s3cret")
        assert "s3cret" not in str(error.value)


# ------------------------------------------------------------------------------ figures


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(3)
    took = rng.lognormal(-4, 1, 5_000)
    kinds = rng.integers(0, 2, 5_000)
    status = rng.choice([200, 500, 503], 5_000, p=[0.8, 0.1, 0.1])
    seen = record(took, kinds=("a", "b"), kind=kinds.tolist(), status=status.tolist(), warmup=100.0)
    counts = 0.1 * np.arange(5_000) >= 100.0
    found = summarize(seen)["kinds"]
    for name, mask in ((ALL, counts), ("a", counts & (kinds == 0)), ("b", counts & (kinds == 1))):
        well = took[mask & (status == 200)]
        expected = np.percentile(well, [50, 95, 99, 99.9, 100])
        np.testing.assert_allclose(list(found[name]["latency"].values()), expected, rtol=1e-9)
        assert found[name]["requests"] == mask.sum()
        assert found[name]["successes"] == len(well)
        assert found[name]["refused"] == {"503": (mask & (status == 503)).sum()}
        assert found[name]["errors"] == {"500": (mask & (status == 500)).sum()}


def test_nothing_has_no_percentiles() -> None:
    assert set(percentiles(np.zeros(0)).values()) == {None}
    found = summarize(record([0.1, 0.1], status=[0, 500]))
    assert found["kinds"]["a"]["errors"] == {"refused": 1, "500": 1}
    assert found["kinds"]["a"]["latency"]["p50"] is None


def test_an_objective_counts_failures_against_it() -> None:
    """Nine of ten in time is 90 %, whether the tenth was slow or was refused at once."""
    slo = Slo(90.0, 0.05)
    fast = [0.01] * 9
    for tenth, status in ((0.06, 200), (0.001, 503), (0.001, 0)):
        within = record([*fast, tenth], status=[200] * 9 + [status]).share_within(slo)
        assert within == pytest.approx(0.9)
        assert slo.is_met(within)
    assert slo.allowed(10) == 1
    assert Slo(99.9, 0.05).allowed(999) == 0
    assert not Slo(99.0, 0.05).is_met(0.98)


def test_time_is_divided_between_stages_and_what_is_left() -> None:
    timing = "store;dur=2, attend;dur=5;desc=x, total;dur=10"
    assert parse_server_timing(timing) == {"store": 0.002, "attend": 0.005, "total": 0.01}
    assert parse_server_timing("miss, a;dur=x, b;dur=1") == {"b": 0.001}
    found = summarize(record([0.03] * 20, late=0.004, timing=timing))["stages"]["a"]
    expected = {"store": 2, "attend": 5, REST: 3, OUTSIDE: 16, WAITED: 4}  # milliseconds
    assert found.keys() == expected.keys()
    for stage, milliseconds in expected.items():
        assert found[stage]["p50"] == pytest.approx(milliseconds / 1e3)
        assert found[stage]["p99"] == pytest.approx(milliseconds / 1e3)


def test_timeline_counts_each_request_where_it_was_due() -> None:
    second = np.arange(60) // 10
    status = np.select([second == 2, second == 5], [500, 429], 200).tolist()
    seen = record(np.where(second == 4, 0.5, 0.1), status=status, warmup=1.0)
    found = summarize(seen)["timeline"]
    assert sum(part["requests"] for part in found) == 50
    assert [part["failures"] for part in found] == [0, 10, 0, 0, 0]
    assert found[1]["latency"]["max"] is None
    assert [part["refusals"] for part in found] == [0, 0, 0, 0, 10]
    slowest = [part["latency"]["max"] for part in found if part["latency"]["max"]]
    assert slowest == pytest.approx([0.1, 0.1, 0.5])
    assert [part["at"] for part in found] == pytest.approx([0.0, 0.98, 1.96, 2.94, 3.92])


@pytest.mark.parametrize(("late", "warned"), [(0.0001, False), (0.02, True)])
def test_a_generator_that_was_late_is_not_trusted(late: float, warned: bool) -> None:
    load = summarize(record([0.05] * 2_000, late=late))
    assert load["generator"]["late"]["p99"] == pytest.approx(late)
    found = {"load": load, "options": {"url": "http://a", "connections": 5}}
    said = [line for line in warnings(found) if "generator was late" in line]
    assert bool(said) is warned


def test_a_ramp_of_few_requests_or_of_a_late_generator_is_not_trusted() -> None:
    load = summarize(record([0.05] * 2_000))

    def step(rate: float, held: bool, late: float, requests: int, ended: str) -> dict[str, Any]:
        return {
            "rate": rate, "held": held, "late": {"p99": late}, "requests": requests, "ended": ended,
        }  # fmt: skip

    def said(*steps: dict[str, Any]) -> str:
        ramp = {"steps": steps, "slo_seconds": 0.05, "slo_percentile": 99.0}
        options = {"url": "http://a", "connections": 5}
        return " ".join(warnings({"load": load, "options": options, "ramp": ramp}))

    assert (
        said(step(10, True, 0.02, 500, "completed"), step(20, False, 0.001, 9, "objective missed"))
        == ""
    )
    assert "at 20.0 a second the objective broke" in said(
        step(10, True, 0.02, 500, "completed"), step(20, False, 0.02, 9, "objective missed")
    )
    assert "of a step of 499 requests 5.0 may be slow" in said(
        step(10, True, 0.0, 499, "completed"), step(20, False, 0.0, 9, "objective missed")
    )


# ------------------------------------------------------------------------------ ramp


@pytest.mark.parametrize("limit", [1.5, 7.0, 40.0, 333.3, 5_000.0])
def test_highest_rate_is_found_within_five_percent(limit: float) -> None:
    tried: list[float] = []

    async def attempt(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    held, broke = asyncio.run(find_highest_rate(40.0, 1e5, attempt))
    assert held is not None
    assert broke is not None
    assert held <= limit < broke <= held * NEAR
    assert len(tried) == len(set(tried)) < 30


def test_a_climb_ends_at_its_bounds() -> None:

    async def all_hold(rate: float) -> bool:
        return True

    async def none_holds(rate: float) -> bool:
        return False

    async def stopped(rate: float) -> bool | None:
        return True if rate < 40 * FACTOR else None

    assert asyncio.run(find_highest_rate(40.0, 100.0, all_hold)) == (100.0, None)
    assert asyncio.run(find_highest_rate(40.0, 100.0, none_holds)) == (None, LEAST)
    assert asyncio.run(find_highest_rate(40.0, 100.0, stopped)) == (40.0, None)


# ------------------------------------------------------------------------------ the page


def _report() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    status = np.where(rng.random(300) < 0.1, 503, 200).tolist()
    kinds = rng.integers(0, 2, 300).tolist()
    timing = "store;dur=2, attend;dur=5, total;dur=10"
    names = ("score", "search")
    some = record(rng.lognormal(-3, 1, 300), kinds=names, kind=kinds, status=status, timing=timing)
    load = summarize(some)
    load["details"] = {"score 503": "<script>alert(1)</script>"}
    options = Options("http://heed.example").as_dict()
    data = {"items": 5, "users": 5, "events": 5, "sampled_items": 5, "sampled_users": 5}
    machine = {"cores": 2, "system": "s", "load_average": 1.0}
    machine |= {"heed": "1", "python": "3"}
    return {
        "options": options, "data": data, "machine": machine, "load": load, "ended": "completed",
        "mix": {"score": 1.0, "search": 1.0}, "distinct_requests": 9, "started": "now",
        "warnings": ["mind <this>"],
    }  # fmt: skip


def _step(rate: float, p99: float, *, held: bool, **more: Any) -> dict[str, Any]:
    """One step of a ramp, of 100 requests, which were all answered unless `more` says otherwise."""
    latency = {"p50": p99 / 4, "p95": p99 / 2, "p99": p99}
    nothing: dict[str, Any] = {"refused": {}, "errors": {}, "details": {}, "late": {"p99": 0.0}}
    step = {"rate": rate, "held": held, "requests": 100, "successes": 100, "within": 1.0}
    return {**step, "latency": latency, "ended": "completed", **nothing, **more}


def _ramp(*steps: dict[str, Any]) -> dict[str, Any]:
    held = [step["rate"] for step in steps if step["held"]]
    broke = [step["rate"] for step in steps if not step["held"]]
    slo = {"slo": "99 % within 50 ms", "slo_seconds": 0.05, "slo_percentile": 99.0}
    return {**slo, "held": max(held, default=None), "broke": min(broke, default=None),
            "steps": list(steps)}  # fmt: skip


OVERLOADED = '{"title": "Overloaded", "status": 429, "detail": "64 are in \\"flight\\" (HEED_MAX)"}'
BUSY = {"refused": {"429": 40}, "successes": 60, "details": {"score 429": OVERLOADED}}
FLOODED = _step(1200, 0.02, held=False, within=0.6, **BUSY)
LATE = _step(12, 0.2, held=False, within=0.9, late={"p99": 0.1})
LIMITED = '{"title":"Rate Limited","detail":"10/s is the rate of shop"}'


@pytest.mark.parametrize(
    ("load", "more", "said"),
    [
        (
            _step(9, 0.031, held=True), {},
            "Heed answered 44.2 requests a second, p99 31.00 ms, and refused none. Next: --ramp",
        ),
        (
            _step(9, 0.031, held=True, **BUSY), {},
            'The first limit: 429 “64 are in "flight" (HEED_MAX)”. Next: start Heed with more',
        ),
        (
            _step(9, 0.031, held=True, **{**BUSY, "details": {"a 429": LIMITED}}), {},
            "“10/s is the rate of shop”. Next: give the API key a higher --rate, or none.",
        ),
        (
            _step(9, 0.031, held=True, errors={"500": 3}), {},
            "refused none. 3 % failed, most with 500. Next: look",
        ),
        (
            {**_step(9, 0.031, held=True), "successes": 0, "refused": {"429": 100},
             "latency": {"p99": None}, "details": {"a 429": OVERLOADED}}, {},
            "Heed answered none of 100 requests, and refused 100 %.",
        ),
        (_step(9, 0.031, held=True), {"ended": "silent"}, "Heed stopped answering, after 100 of"),
        (
            _step(9, 0.3, held=False, refused={"429": 1}), {"slo": {"held": False, "within": 0.9}},
            "The first limit: p99 was 300 ms. Next: start Heed with more workers",
        ),
        (
            _step(9, 0.031, held=True),
            {"ramp": _ramp(_step(9, 0.031, held=True), _step(12, 0.2, held=False, within=0.9))},
            "The first limit at 12 a second: p99 was 200 ms. Next: start Heed with more workers",
        ),
        (
            _step(9, 0.031, held=True),
            {"ramp": _ramp(_step(9, 0.031, held=True), FLOODED)},
            "refused none. The first limit at 1,200 a second: 40 % were refused, 429 “64 are in",
        ),
        (
            _step(9, 0.031, held=True),
            {"ramp": _ramp(_step(12, 0.2, held=False, late={"p99": 0.1}))},
            "99 % within 50 ms held at no rate. The first limit: p99 was 31.00 ms. Next: start",
        ),
        (
            _step(9, 0.031, held=True),
            {"ramp": _ramp(_step(9, 0.031, held=True), LATE)},
            "p99 was 200 ms. Next: give the load test a core of its own and run it again",
        ),
        (
            _step(9, 0.031, held=True), {"ramp": _ramp(_step(9, 0.031, held=True))},
            "refused none. Next: raise --max-rate, for no rate broke the objective.",
        ),
    ],
)  # fmt: skip
def test_the_verdict_names_the_first_limit_and_what_to_do(
    load: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    found = {"kinds": {ALL: load}, "successes_per_second": 44.2, "details": load["details"]}
    found |= {"slo": more.pop("slo")} if "slo" in more else {}
    report = {"ended": "completed", "load": found, "data": {"worker_up": 2}, **more}
    assert said in verdict(report)


def test_charts_have_axes_with_units() -> None:
    report = _report()
    report["ramp"] = _ramp(_step(20, 0.03, held=True), _step(80, 0.9, held=False))
    report["memory"] = {"readings": [(0.0, 2**28), (10.0, 2**29)], "start": 1, "third": 1, "end": 1}
    by_rate, latency, requests, memory = draw_charts(report)
    assert [(each.x, each.y) for each in (by_rate, latency, requests, memory)] == [
        ("requests a second", "ms"),
        ("seconds after the warm-up", "ms"),
        ("seconds after the warm-up", "requests a second"),
        ("seconds after the first request", "MiB"),
    ]
    for chart in (by_rate, latency, requests, memory):
        assert [mark.at for mark in chart.x_marks] == sorted(mark.at for mark in chart.x_marks)
        assert (chart.x_marks[0].at, chart.x_marks[-1].at) == (FRAME.left, FRAME.right)
        assert (chart.y_marks[0].at, chart.y_marks[-1].at) == (FRAME.bottom, FRAME.top)
        assert chart.y_marks[0].text == "0"
    assert [line.name for line in by_rate.lines] == ["p50", "p95", "p99"]
    assert [mark.text for mark in by_rate.x_marks] == ["20", "40", "60", "80"]
    # Of 900 ms on an axis to 1,000 ms, nine tenths of the way up; the objective is at 50 ms.
    height = FRAME.bottom - FRAME.top
    assert by_rate.lines[2].dots[1][1] == pytest.approx(FRAME.bottom - 0.9 * height, abs=0.1)
    assert by_rate.limit == pytest.approx(FRAME.bottom - 0.05 * height, abs=0.1)
    assert [line.name for line in requests.lines] == ["answered", "refused", "failed"]
    report["verdict"] = "Heed answered."
    text = re.sub(r"\s+", " ", render_page(report))
    assert '</h1> <p class="verdict">Heed answered.</p>' in text
    for chart in (by_rate, latency, requests, memory):
        assert f">{chart.x}</text>" in text
        assert f">{chart.y}</text>" in text


def test_the_page_needs_no_network_and_escapes_what_it_shows() -> None:
    text = render_page(_report())
    assert text.count("<figure") == 2
    assert text.count("<polyline") == 6
    for fetching in ("<script", "<link", "<img", "<iframe", "<this", " src=", " href=", "url("):
        assert fetching not in text
    assert "https://" not in text
    assert text.count("http://") == text.count("http://heed.example")
    assert "&lt;script&gt;" in text
