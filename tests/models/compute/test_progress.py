"""A stopwatch under a clock that stands where the test wants it."""

import math
import time

import pytest

from models.compute.progress import Stopwatch


def test_the_time_left_is_at_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step on, which may be the first of a training that was gone on with."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Stopwatch(90.0)
    assert math.isnan(clock.remaining(0.5))  # half was done before
    now[0] = 120.0
    assert clock.remaining(0.6) == pytest.approx(80)  # a tenth in 20 seconds, four are left
    now[0] = 160.0
    assert clock.remaining(1.0) == 0
    assert clock.seconds == 70
