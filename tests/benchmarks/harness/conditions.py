"""Conditions of a benchmark: one thread a kernel, a server without deadlines, an end on SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from service.domain.settings import Settings
from tests.benchmarks.harness.processes import Cores, Server, serving
from tests.benchmarks.workload.data import BenchmarkData

# What is measured is speed, so no request may be cut off for being slow on a busy machine.
SETTINGS = {"HEED_DEADLINE": "60", "HEED_LOG_LEVEL": "warning"}


def environment() -> dict[str, str]:
    """The HEED_* variables of a server that is measured: texts are read as here."""
    own = Settings.read()
    return SETTINGS | {"HEED_ENCODER": own.encoder, "HEED_EMBEDDING_DIM": str(own.embedding_dim)}


@contextmanager
def serve_data(ground: BenchmarkData, cores: Cores) -> Iterator[Server]:
    """Heed over the ground, on the core of servers."""
    with serve_directory(ground.data, cores.server) as heed:
        yield heed


@contextmanager
def serve_directory(
    data: Path, core: int | frozenset[int] | None, *, store: str = ""
) -> Iterator[Server]:
    """Heed over a data directory, with its store there or in the database of a URL.

    Args:
        data: the directory.
        core: which one it runs on, or which; None = any.
        store: the URL; without one, the file in the directory.
    """
    arguments = ["-m", "service.cli", "serve", "--data", str(data), "--port", "0"]
    settings = environment() | ({"HEED_STORE": store} if store else {})
    with serving(arguments, core=core, environment=settings) as heed:
        yield heed


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for each kernel, as the service has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this as Ctrl-C does, so that servers and folders do not stay behind."""

    def stop(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
