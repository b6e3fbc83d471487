"""Rows that the test suite proves, run by pytest in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

from tests.faults.matrix import Setup, Verdict
from tests.support.server import ROOT


def _run(tests: tuple[str, ...], weaker: str | None, _setup: Setup) -> Verdict:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.search(r"(\d+ failed, )?(\d+) passed", done.stdout)
    figure = found[0] if found else done.stdout[-200:]
    return Verdict(done.returncode == 0, f"{figure}: {', '.join(tests)}", weaker)


models = partial(
    _run,
    (
        "tests/service/snapshots/test_registry_crash.py",
        "tests/service/snapshots/test_registry.py",
        "tests/acceptance/test_swapping.py",
    ),
    "a publication without one fsync: found",
)
inputs = partial(
    _run, ("tests/service/http/test_openapi.py", "tests/service/http/test_openapi_engine.py"), None
)
names = partial(_run, ("tests/service/snapshots/test_registry.py", "-k", "leave"), None)
