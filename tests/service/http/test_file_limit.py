"""The limit on open files: raised for the wanted connections, or reported as too low."""

from __future__ import annotations

import logging
import resource

import pytest

from service.domain.settings import Settings
from service.http import server as file_limit

Limits = tuple[int, int]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """The limits of the process, soft and hard; the last of them holds."""
    held: list[Limits] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: held.append(limits))
    return held


@pytest.mark.parametrize("hard", [4096, resource.RLIM_INFINITY])
def test_the_limit_is_raised_for_the_connections(
    limits: list[Limits], hard: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A soft limit below what the connections need is raised, and nothing is said."""
    limits.append((256, hard))
    settings = Settings(max_connections=1000)
    assert file_limit.fit_connections(settings) is settings
    assert 1000 < limits[-1][0] <= 4096
    assert limits[-1][1] == hard
    assert caplog.records == []


def test_a_hard_limit_bounds_the_connections(
    limits: list[Limits], caplog: pytest.LogCaptureFixture
) -> None:
    """Under a low hard limit fewer connections are kept, and the log says how many and why."""
    limits.append((256, 1024))
    with caplog.at_level(logging.WARNING):
        fitted = file_limit.fit_connections(Settings(max_connections=1000))
    assert limits[-1] == (1024, 1024)
    assert 0 < fitted.max_connections < 1000
    said = caplog.messages[0]
    for each in ("HEED_MAX_CONNECTIONS", "1000", "1024", str(fitted.max_connections), "ulimit -n"):
        assert each in said


def test_a_limit_that_suffices_is_left(limits: list[Limits]) -> None:
    limits.append((100_000, 100_000))
    file_limit.fit_connections(Settings())
    assert limits == [(100_000, 100_000)]
