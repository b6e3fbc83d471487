"""Freed memory, given back to the system."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable


def _trim() -> Callable[[], None]:
    name = ctypes.util.find_library("c")
    try:
        function = ctypes.CDLL(name).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return lambda: None

    def trim() -> None:
        function(0)

    return trim


trim = _trim()
"""Let glibc give back what was freed between what is still in use; nothing elsewhere.

Tensors of ever different sizes leave holes that it would keep: training holds half as much with
this every few seconds, and takes no longer.
"""
