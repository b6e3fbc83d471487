"""Recommending from a catalogue that is just large enough for an index."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from models.catalogue.snapshot import ENCODER_TIMES, INDEX_FROM
from service.domain.errors import Invalid
from tests.benchmarks.catalogue import large_recommending
from tests.benchmarks.harness.conditions import environment, one_thread
from tests.benchmarks.harness.processes import Cores
from tests.benchmarks.harness.timing import ProgressCallback, no_progress
from tests.benchmarks.workload.data import prepare_data
from tests.benchmarks.workload.loaded import load_data

ITEMS, INDEXED = 700, ENCODER_TIMES * INDEX_FROM


def test_answers_over_http_are_those_of_the_copies() -> None:
    """Answers over HTTP have at least the recall of the bare index."""
    stages: list[str] = []

    def start_stage(name: str) -> ProgressCallback:
        stages.append(name)
        return no_progress

    with one_thread(), prepare_data(None, items=ITEMS, users=5) as ground:
        source = load_data(ground)
        found = large_recommending.measure(
            ground, source, INDEXED, Cores.choose(), environment(),
            rounds=2, requests=4, stage=start_stage,
        )  # fmt: skip
    assert found.items == ITEMS * found.copies >= INDEXED
    names = ["recommend-200", "recommend-1000"]
    assert [case.question for case in found.cases] == [*names, *(f"{n}-recall" for n in names)]
    assert not any(case.failed for case in found.cases)
    recalls = found.recalls
    assert recalls.users == 5
    # What the index's candidates have, the answer has; transitions may find more.
    assert 0.5 < recalls.index <= recalls.answers + 1e-9 <= 1 + 1e-9
    # More candidates are asked for where they have more, and never more than a quarter of all.
    assert recalls.index <= recalls.index_times
    few, many = found.candidates[:2], found.candidates[2:]
    assert many == [recalls.times * each for each in few]
    assert recalls.times == 1 or max(many) <= found.items / 4
    assert list(dict.fromkeys(stages)) == ["items", "index", "exact answers", "questions"]
    console = Console(record=True, width=160)
    console.print(large_recommending.shown(found))
    assert "times the index" in console.export_text()
    assert {"times_the_index", "job_seconds"} <= found.as_dict()["cases"][0].keys()


def test_without_a_trained_model_there_is_nothing_to_copy() -> None:
    """A source without a trained model is refused."""
    with prepare_data(None, items=300, users=3) as ground:
        source = load_data(ground)
        bare = replace(source, snapshot=replace(source.snapshot, trained=None))
        with pytest.raises(Invalid, match="no trained model"):
            large_recommending.measure(
                ground, bare, 1_000, Cores.choose(), environment(), rounds=1, requests=1
            )
