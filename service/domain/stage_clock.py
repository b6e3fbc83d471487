"""Stage timing of one request, for the `Server-Timing` header and the metrics."""

from __future__ import annotations

import time


class _Stage:
    """One entry of a stage; `contextlib.contextmanager` would take three times as long."""

    __slots__ = ("clock", "name", "started")

    def __init__(self, clock: StageClock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        clock, name, ended = self.clock, self.name, time.perf_counter()
        clock.seconds[name] = clock.seconds.get(name, 0.0) + ended - self.started
        if clock.entries is not None:
            clock.entries.append((name, self.started, ended))


class StageClock:
    """Clock of one request: `with stages("store"): …` adds to the seconds of that stage.

    Stage names are RFC 9110 tokens, since they go into a header. A stage may be entered many times,
    and stages may nest; the time of an inner stage counts for the outer one too.
    """

    __slots__ = ("entries", "seconds", "started")

    def __init__(self, *, keep_entries: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()
        # Each entry of a stage with its begin and end, by `perf_counter`; None if not kept.
        self.entries: list[tuple[str, float, float]] | None = [] if keep_entries else None

    def __call__(self, name: str) -> _Stage:
        """Return a context manager that adds the time of its block to the stage `name`."""
        return _Stage(self, name)

    def header(self) -> str:
        """Return the value of `Server-Timing`: each stage and the total so far, in milliseconds."""
        total = time.perf_counter() - self.started
        parts = [f"{name};dur={1e3 * seconds:.3f}" for name, seconds in self.seconds.items()]
        parts.append(f"total;dur={1e3 * total:.3f}")
        return ", ".join(parts)
