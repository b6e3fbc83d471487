"""Attention over long memories: errors against float64, and the report."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from models.history.attention_options import Crossover
from tests.benchmarks.__main__ import app
from tests.benchmarks.attention import long_attention, long_keys, long_report
from tests.benchmarks.attention.long_attention import Case, Off
from tests.support import tiny

ALWAYS = Crossover(64, 64)


def cases(name: str = "random", n: int = 4_000) -> list[Case]:
    """Drawn keys in cells, for one target and for many."""
    made = long_keys.drawn(n, 40, 0.5)
    assert made.name.startswith(name)
    return long_attention.measure(
        [made], (1, 40), 1, count=1, crossover=ALWAYS, max_error=0.5, top_k_up_to=n
    )


def test_errors_are_relative_to_what_they_say() -> None:
    """Score errors are relative to the standard deviation, context errors to the length."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(2, 30, 3, generator=generator, dtype=torch.float64)
    outputs = torch.randn(2, 30, 3, generator=generator)
    same = Off.of(exact.float(), exact, outputs)
    assert same.context_p99 < 1e-6
    assert same.overlap == 1
    longer = Off.of(1.1 * exact, exact, outputs)
    assert longer.context_median == pytest.approx(0.1, rel=1e-5)
    scores = (exact * outputs).sum((0, 2))
    wanted = float((0.1 * scores.abs() / scores.std()).median())
    assert longer.score_median == pytest.approx(wanted, rel=1e-5)
    turned = Off.of(-exact, exact, outputs)
    assert turned.overlap < 1
    assert math.isnan(Off.of(exact[:, :1], exact[:, :1], outputs[:, :1]).score_median)


def test_a_case_is_judged_by_the_exact_contexts() -> None:
    """Clusters are within the allowed error, and a top-k of 64 rows is far off."""
    one, many = cases()
    assert (one.targets, many.targets) == (1, 40)
    assert many.path == "cells"
    assert many.pairs == 160
    assert many.kept >= 0.99 * many.pairs
    assert many.off.context_median <= 0.5
    assert many.held < 400
    assert many.top_k[64].context_median > 1
    assert many.faster.median > 0


def test_events_on_one_item_are_one_row(world: tiny.World) -> None:
    """Repeated events collapse to one row per item without changing the softmax."""
    long = long_keys.long_users(world.data, "static")
    made = long_keys.repeated(long, 5_000, 10)
    assert made.keys.shape[1] <= 60
    assert made.whole is not None
    keys, values = made.whole()
    assert keys.shape[1] == 5_000
    scores = made.queries.double() @ keys.double().mT / keys.shape[2] ** 0.5
    wanted = torch.softmax(scores, -1) @ values.double()
    found = long_attention._exact(made)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    distinct = long_keys.distinct(long, 3_000, 10)
    assert len(torch.unique(distinct.keys[0], dim=0)) == 3_000


def test_the_report_says_all_of_it(tmp_path: Path) -> None:
    """The report has tables, sentences and a plot."""
    found = cases()
    text = io.StringIO()
    long_report.show(Console(file=text, width=200), found)
    for part in ("times as fast", "stated", "at our time", "Within the 1.00% asked for"):
        assert part in text.getvalue()
    picture = tmp_path / "attention.png"
    long_report.plot([replace(found[1], targets=100)], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_measures_drawn_keys(tmp_path: Path) -> None:
    """`attention --random` measures without a model and writes JSON."""
    out = tmp_path / "attention.json"
    result = CliRunner().invoke(
        app,
        ["attention", "--random", "--quick", "--most", "1000", "--rounds", "1", "--json", str(out)],
    )
    assert result.exit_code == 0, result.output
    assert {case["events"] for case in json.loads(out.read_text())} == {100, 1_000}


def test_without_a_model_it_says_what_to_do(world: tiny.World, tmp_path: Path) -> None:
    """Without a model the command fails and names `heed train`."""
    data = world.copy(tmp_path / "data", trained=False)
    result = CliRunner().invoke(app, ["attention", "--data", str(data)])
    assert result.exit_code != 0
    assert "heed train" in str(result.exception)
