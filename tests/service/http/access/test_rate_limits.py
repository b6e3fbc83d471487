"""Rate limits: sliding windows that forked processes share."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time

import pytest

from service.domain.errors import RateLimited
from service.domain.keys import Rate, issue_key
from service.http.rate_limits import RateLimits, SharedWindows
from tests.support.http_fake import serving

DAY = Rate(5, 86_400)


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the windows."""
    return Clock(monkeypatch)


def test_a_key_beyond_its_rate_gets_429_and_when_to_come_back() -> None:
    """The limit, its amount and the wait are named; other keys are not affected."""
    with serving() as client:
        limited, free = client.engine.issue("read", rate=DAY), client.engine.issue("read")
        headers = {"authorization": f"Bearer {limited}"}
        statuses = [client.get("/v1/users", headers=headers).status_code for _ in range(7)]
        assert statuses == [200] * 5 + [429] * 2
        refused = client.get("/v1/users", headers=headers)
        assert 1 <= int(refused.headers["retry-after"]) <= 86_400
        detail = refused.json()["detail"]
        assert "shop may send 5/d requests" in detail
        assert f"again in {refused.headers['retry-after']} s" in detail
        assert client.get("/health/live", headers=headers).status_code == 200
        headers = {"authorization": f"Bearer {free}"}
        assert client.get("/v1/users", headers=headers).status_code == 200


def test_no_window_holds_more_than_the_rate(clock: Clock) -> None:
    """Under more attempts than the rate, no window has more, and little less is let through."""
    windows = SharedWindows()
    rate = limit, expiry = Rate(10, 60)
    accepted: list[float] = []
    for step in range(2_000):  # ten minutes of three attempts a second, and some bursts
        clock.now = 1_000_000 + step * 0.3
        attempts = 1 + 20 * (step % 90 == 0)
        taken = [windows.count("key", rate) is None for _ in range(attempts)]
        accepted += [clock.now] * sum(taken)
    first = int(accepted[0] // expiry)
    counts = [sum(at // expiry == first + n for at in accepted) for n in range(11)]
    assert max(counts) <= limit
    assert len(accepted) >= 0.8 * limit * 10
    clock.now += 2 * expiry
    waits = [windows.count("key", rate) for _ in range(11)]
    assert waits[:10] == [None] * 10
    assert 0 < (waits[10] or 0) <= expiry


def test_forked_processes_count_together() -> None:
    """Four processes that compete for 1,000 requests get exactly 1,000."""
    limits = RateLimits()
    key, _ = issue_key("shop", frozenset({"read"}), 0)
    rate = Rate(1_000, 86_400)
    children = []
    for _ in range(4):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            done = 0
            for _ in range(500):
                try:
                    asyncio.run(limits.count(key, rate))
                    done += 1
                except RateLimited:
                    pass
            os.write(writer, str(done).encode())
            os._exit(0)
        os.close(writer)
        children.append((pid, reader))
    counted = []
    for pid, reader in children:
        counted.append(int(os.read(reader, 100)))
        os.close(reader)
        os.waitpid(pid, 0)
    assert sum(counted) == 1_000


def test_a_killed_process_blocks_no_other() -> None:
    """The lock of a process that is killed while it holds it is free again."""
    windows = SharedWindows()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        fcntl.lockf(windows._descriptor, fcntl.LOCK_EX)
        os.write(writer, b"held")
        time.sleep(600)
        os._exit(0)
    assert os.read(reader, 4) == b"held"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for descriptor in (reader, writer):
        os.close(descriptor)
    assert windows.count("key", Rate(1, 60)) is None


def test_more_keys_than_slots_displace_the_oldest(clock: Clock) -> None:
    """A full table still limits: a key that comes often keeps its count."""
    windows = SharedWindows()
    for n in range(40_000):
        clock.now += 0.001
        windows.count(f"key {n}", Rate(3, 86_400))
    taken = [windows.count("often", Rate(3, 86_400)) is None for _ in range(5)]
    assert taken == [True] * 3 + [False] * 2
