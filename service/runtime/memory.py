"""Memory that this process may still take, and its return to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
from collections.abc import Callable
from pathlib import Path


def trim() -> None:
    """Let glibc return free memory between live blocks to the system; a no-op elsewhere.

    Tensors of ever different sizes leave holes that glibc would keep: training holds half as much
    memory with this call every few seconds, and takes no longer.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim: Callable[[int], int] | None
try:
    _malloc_trim = ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim
except (OSError, AttributeError):  # not glibc
    _malloc_trim = None


_CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own
_MEMINFO = Path("/proc/meminfo")


def memory_room(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int | None:
    """Return the bytes that are left, by the tighter of both limits; None where neither is known.

    Files that the kernel keeps in memory for the container count as taken only as far as it cannot
    drop them.
    """
    rooms = []
    with contextlib.suppress(OSError, ValueError):
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            taken = int((cgroup / "memory.current").read_text())
            rooms.append(int(limit) - taken + _inactive_files(cgroup))
    with contextlib.suppress(OSError, ValueError):
        rooms += [
            1024 * int(line.split()[1])
            for line in meminfo.read_text().splitlines()
            if line.startswith("MemAvailable:")
        ]
    return max(0, min(rooms)) if rooms else None


def _inactive_files(cgroup: Path) -> int:
    for line in (cgroup / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
