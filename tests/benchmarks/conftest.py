"""Servers of benchmarks on threads of the tests' process, where a process proves no more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.domain.settings import PREFIX, Settings
from service.http.app import create_app
from tests.benchmarks.catalogue import large_recommending
from tests.benchmarks.harness import conditions
from tests.benchmarks.harness.processes import Server
from tests.benchmarks.http import floor, latency
from tests.support.threaded_server import serving_app


def _app(arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
    """The app that a server started with these arguments would serve."""
    if "service.cli" in arguments:
        named = {name.removeprefix(PREFIX).lower(): text for name, text in environment.items()}
        named["data"] = arguments[arguments.index("--data") + 1]
        return create_app(Settings(**named))  # type: ignore[arg-type]  # texts, as of variables
    paths = arguments[arguments.index("tests.benchmarks.http.floor") + 1 :]
    return floor.load_app(*map(Path, paths))


@contextmanager
def serving_on_a_thread(
    arguments: Sequence[str], *, environment: Mapping[str, str], **_: Any
) -> Iterator[Server]:
    """Stand in for `serving`: a process of its own imports torch first, which takes seconds."""
    with serving_app(_app(arguments, environment)) as port:
        yield Server(os.getpid(), port)


@pytest.fixture(scope="session", autouse=True)
def servers_on_threads() -> Iterator[None]:
    """Start servers on threads; the tests of processes start real ones."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (conditions, latency, large_recommending):
            patch.setattr(module, "serving", serving_on_a_thread)
        yield
