"""`make bench ARGS=overload`: every request is accounted for; figures are the machine's own."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import serving_on_a_thread
from tests.benchmarks.harness.processes import Cores
from tests.benchmarks.http import overload
from tests.benchmarks.workload.data import prepare_data


def test_a_small_run_measures_every_rate() -> None:
    """Each round has a capacity, and an attempt at each multiple of it without other failures."""
    with prepare_data(None, items=300, users=4) as ground:
        arguments = ["service.cli", "serve", "--data", str(ground.data), "--port", "0"]
        environment = {"HEED_DEADLINE": "60", "HEED_LOG_LEVEL": "warning"}
        with serving_on_a_thread(arguments, environment=environment, core=None) as server:
            found = overload.measure(
                server,
                Cores.choose(),
                deadline=60,
                mix="score=1,search=1",
                rounds=1,
                seconds=0.2,
                closed=60,
            )
    assert len(found.capacity) == 1
    for factor, (attempt,) in found.attempts.items():
        assert attempt.rate == pytest.approx(factor * found.capacity[0])
        assert attempt.goodput > 0
        assert attempt.other == 0
        assert 0 < found.kept(factor).median <= 1
    assert [line[0] for line in found.rows()] == ["1 ×", "2 ×", "3 ×"]
    assert found.as_dict()["rates"].keys() == {1, 2, 3}
