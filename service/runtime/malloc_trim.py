"""Return of freed memory from the C allocator to the operating system."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable


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
