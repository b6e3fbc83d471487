"""`make bench ARGS=ready`: real servers start over a generated store; figures are their own."""

from __future__ import annotations

from pathlib import Path

from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.http.ready import measure, ratios, shown


def test_a_small_run_measures_every_start(tmp_path: Path) -> None:
    """The store has the given number of events, and each start states its stages."""
    starts = ("again",)  # which is killed in the end
    found = measure([3_000], items=150, users=40, starts=starts, workers=2, keep=tmp_path)
    assert [each.start for each in found] == list(starts)
    for each in found:
        assert set(each.stages) == {"process", "catalogue", "popularity", "model"}
        assert each.seconds > 0
        assert each.resident > 0
    assert [each.log_seconds is None for each in found] == [False]
    assert ratios(found) == {"again": 1.0}
    assert shown(found).row_count == len(starts)
    store = SQLiteStore(tmp_path / "150-3000" / STORE_FILE)
    assert sum(len(columns) for columns in store.scan()) == 3_000
