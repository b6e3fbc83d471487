"""Hardware, system and versions that a run was made on, without which figures mean little."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import apsw
import torch

from service import __version__
from tests.benchmarks.harness.processes import Cores

_PACKAGES = ("torch", "faiss-cpu", "numpy", "fastapi", "pydantic", "uvicorn", "orjson", "apsw")


def describe_machine(folder: Path, cores: Cores) -> dict[str, Any]:
    """Hardware, system, versions, and what else keeps the machine busy.

    Args:
        folder: where the stores are written.
        cores: which ones server and client run on.
    """
    return {
        **describe_host(),
        "placement": str(cores),
        "threads_a_kernel": torch.get_num_threads(),
        "file_system": _file_system(folder),
        "sqlite": apsw.sqlite_lib_version(),
    }


def describe_host() -> dict[str, Any]:
    """Describe the machine and the installed versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "heed": __version__,
        **{name: version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    try:
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _file_system(folder: Path) -> str | None:
    """The kind of file system that holds a folder; in memory, what is durable costs nothing."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    real = folder.resolve()
    holding = [(len(at), kind) for _, at, kind, *_ in mounts if real.is_relative_to(at)]
    return max(holding)[1] if holding else None
