"""Arrays that forked processes share, and a process that is killed while it makes them."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from service.runtime.workers import SharedArrays

# The first child claims the arrays and is killed before it has published them.
KILLED = """
import os, signal, time
import numpy as np
from service.runtime.workers import SharedArrays
shared, (read, write) = SharedArrays(), os.pipe()
first = os.fork()
if not first:
    assert shared.claim()
    os.pwrite(shared._file, b"x" * 5000, 0)
    os.write(write, b".")
    time.sleep(600)
os.read(read, 1)
assert not shared.claim() and not shared.is_published
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
second = os.fork()
if not second:
    assert shared.claim()
    shared.publish({"numbers": np.arange(1000), "none": np.zeros((0, 3), np.float32)})
    os._exit(0)
assert os.waitpid(second, 0)[1] == 0
assert shared.is_published and not shared.claim()
numbers, none = shared.arrays()["numbers"], shared.arrays()["none"]
assert numbers.sum() == 499500 and none.shape == (0, 3) and none.dtype == np.float32
print("equal")
"""


def test_the_successor_of_a_killed_process_publishes() -> None:
    """A claim ends with its process, and what the next one publishes is read by all."""
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("equal\n", "")


def test_arrays_are_mapped_and_not_writable() -> None:
    """Published arrays are pages of one file, and refuse writes; before, they cannot be read."""
    shared = SharedArrays()
    with pytest.raises(RuntimeError):
        shared.arrays()
    assert shared.claim()
    shared.publish({"bytes": np.ones(1 << 20, np.uint8)})
    shared.release()
    found = shared.arrays()["bytes"]
    assert found.all()
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0
    with open(f"/proc/{os.getpid()}/maps") as maps:
        assert any("memfd:heed-shared" in line for line in maps)
