"""The remaining time of a stopwatch, under a fake clock."""

import math
import time

import pytest

from models.compute.checkpoint import Stopwatch


def test_remaining_time_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining time follows the pace since the first step, also of a resumed training."""
    now = [90.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Stopwatch()
    now[0] = 100.0
    assert math.isnan(clock.remaining(0.5))  # half was done before
    now[0] = 120.0
    assert clock.remaining(0.6) == pytest.approx(80)  # a tenth in 20 seconds, four are left
    now[0] = 160.0
    assert clock.remaining(1.0) == 0
    assert clock.seconds == 70
