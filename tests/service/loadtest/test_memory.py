"""The server's memory under load, as it says itself."""

from __future__ import annotations

import time
from typing import Any

from service.loadtest.memory import Watch, resident
from service.loadtest.report.words import verdicts
from tests.support.loadtest_fake import Fake, faking, well

ONE = "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes 1.5e+08\nx 3\n"
SEVERAL = (
    'process_resident_memory_bytes{worker="0"} 1e+08\n'
    'process_resident_memory_bytes{worker="1"} 2e+08\n'
)


def test_all_processes_count() -> None:
    """One process has one series, several workers have one each, and others have none."""
    assert resident(ONE) == 150_000_000
    assert resident(SEVERAL) == 300_000_000
    assert resident("heed_http_in_flight 1\n") is None


def test_it_is_looked_at_until_the_end(monkeypatch: Any) -> None:
    """Growth is seen: at the beginning, after a third of the time, at the end and at most."""
    sizes = iter(range(100, 10_000, 100))

    def grown(self: Watch) -> None:
        self.seen.append((time.monotonic() - self._began, float(next(sizes))))

    monkeypatch.setattr(Watch, "_look", grown)
    with Watch("http://127.0.0.1:9", (), 1.0) as watch:
        watch._every = 0.05
        time.sleep(1.5)
    found = watch.as_dict()
    assert found is not None
    assert found["start"] == 100
    assert found["start"] <= found["third"] <= found["end"] == found["most"] >= 300
    assert found["end"] == found["seen"][-1][1]
    lines = verdicts({"load": {"kinds": {"all": {"unfinished": 0}}}, "ended": "completed",
                      "options": {"silence": 1}, "memory": {"start": 2**20, "third": 2**21,
                                                            "end": 2**22}})  # fmt: skip
    assert lines == [
        "The server held 1 MiB at the beginning, 2 after a third of the time and 4 at the end."
    ]


def test_a_server_without_metrics_is_not_watched() -> None:
    """It refuses once, is not asked again, and nothing is said."""

    class Counting(Fake):
        looks = 0

        def listed(self, path: str) -> Any:
            self.looks += path == "/metrics"
            return super().listed(path)

    with faking(well) as fake:
        fake.__class__ = Counting
        with Watch(fake.url, (), 1.0) as watch:
            time.sleep(1.2)
        assert watch.as_dict() is None
        assert fake.looks == 1  # type: ignore[attr-defined]
