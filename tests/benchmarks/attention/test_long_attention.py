"""Attention over long memories: errors against float64, and the report."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.benchmarks.__main__ import app
from tests.benchmarks.attention import long_attention, long_keys, long_report
from tests.benchmarks.attention.long_attention import Case
from tests.benchmarks.harness.timing import Timed
from tests.support import tiny


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Drawn keys, their own values, for one target by every row and for many by lists."""
    drawn = long_keys.drawn(4_000, 40, 0.5)
    measure = partial(
        long_attention.measure, [replace(drawn, values=drawn.keys)], 1, count=1, max_error=0.2
    )
    return measure(targets=(1,), lists_from=5_000) + measure(targets=(40,), lists_from=64)


def test_a_case_is_judged_by_the_exact_contexts(cases: list[Case]) -> None:
    """Every row is exact, lists are within what they state, and a top-k is far off."""
    found = {(each.way, each.targets): each for each in cases}
    assert set(found) == {("every row", 1), ("lists", 40), ("top-k", 40)}
    assert found["every row", 1].error[2] < 1e-4
    lists = found["lists", 40]
    assert lists.stated is not None
    assert 1e-4 < lists.error[0] <= lists.stated[0] <= lists.stated[1] <= 0.2
    assert lists.within_asked >= 0.99
    assert lists.within_stated >= 0.97
    assert lists.scanned < 4_000
    assert 0 < lists.held < 400
    top = found["top-k", 40]
    assert top.error[0] > 0.2
    assert top.scanned == 256
    assert 0 < top.mass < 0.5
    assert all(each.ratio.median > 0 for each in cases)


def test_the_crossover_is_where_both_take_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that take a quarter of the time of 4,000 rows take that of 1,000, for each number."""
    timed: list[set[str]] = []

    def alternate(works: dict[str, Callable[[], object]], rounds: int) -> Timed:
        for work in works.values():
            work()
        timed.append(set(works))
        return Timed({"lists": [1.0] * rounds, "every row": [4.0 / len(timed)] * rounds})

    monkeypatch.setattr(long_attention, "alternate", alternate)
    found = long_attention.measure_crossover(long_keys.drawn(4_000, 100, 0.1), 3)
    assert found == [1_000, 2_000]
    assert timed == [{"lists", "every row"}] * 2


def test_events_on_one_item_are_one_row(world: tiny.World) -> None:
    """Repeated events collapse to one row per item without changing the softmax."""
    long = long_keys.long_users(world.data, "static")
    made = long_keys.repeated(long, 5_000, 10)
    assert made.rows <= 60
    assert made.whole is not None
    keys, values = made.whole()
    assert keys.shape[1] == 5_000
    scores = made.queries.double() @ keys.double().mT / keys.shape[2] ** 0.5
    wanted = torch.softmax(scores, -1) @ values.double()
    found = long_attention.exact_contexts(made)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    distinct = long_keys.distinct(long, 3_000, 10)
    assert len(torch.unique(distinct.keys[0], dim=0)) == 3_000


def test_the_report_says_all_of_it(cases: list[Case]) -> None:
    """The report has tables and sentences."""
    text = io.StringIO()
    long_report.show(Console(file=text, width=250), cases)
    for part in ("times as fast", "within stated", "rows scanned", "By lists, "):
        assert part in text.getvalue()


def test_the_command_measures_drawn_keys(tmp_path: Path) -> None:
    """`attention --random` measures without a model and writes JSON."""
    out = tmp_path / "attention.json"
    result = CliRunner().invoke(
        app, ["attention", "--random", "--most", "1000", "--rounds", "1", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert {case["events"] for case in json.loads(out.read_text())} == {1_000}
    assert "Lists take the time of every row at" in result.output


def test_without_a_model_it_says_what_to_do(world: tiny.World, tmp_path: Path) -> None:
    """Without a model the command fails and names `heed train`."""
    data = world.copy(tmp_path / "data", trained=False)
    result = CliRunner().invoke(app, ["attention", "--data", str(data)])
    assert result.exit_code != 0
    assert "heed train" in str(result.exception)
