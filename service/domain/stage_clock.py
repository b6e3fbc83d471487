"""Stage timing of one request, for the `Server-Timing` header and the metrics."""

from __future__ import annotations

import time
from types import TracebackType


class StageClock:
    """Clock of one request: `with stages("store"): …` adds to the seconds of that stage.

    Stage names are RFC 9110 tokens, since they go into a header. A stage may be entered many times,
    and stages may nest; the time of an inner stage counts for the outer one too.
    """

    __slots__ = ("seconds", "started")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    def __call__(self, name: str) -> _Stage:
        """Return a context manager that adds the time of its block to the stage `name`."""
        return _Stage(self, name)

    def header(self) -> str:
        """Return the value of `Server-Timing`: each stage and the total so far, in milliseconds."""
        total = time.perf_counter() - self.started
        parts = [f"{name};dur={1e3 * seconds:.3f}" for name, seconds in self.seconds.items()]
        parts.append(f"total;dur={1e3 * total:.3f}")
        return ", ".join(parts)


class _Stage:
    __slots__ = ("name", "stages", "started")

    def __init__(self, stages: StageClock, name: str) -> None:
        self.stages = stages
        self.name = name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = self.stages.seconds
        seconds[self.name] = seconds.get(self.name, 0.0) + time.perf_counter() - self.started
