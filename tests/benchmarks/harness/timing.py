"""Timing of reference and candidate in turns: ratios of one run, as medians with quartiles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ProgressCallback = Callable[[int, int], None]  # how much is done, and of how much
_SHORTEST = 2e-3  # seconds that one sample lasts at least: a shorter call is repeated within it


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        return {"median": self.median, "q25": self.low, "q75": self.high}


def spread(samples: Sequence[float]) -> Spread:
    """The median and quartiles of samples, of which there is at least one."""
    low, median, high = np.quantile(np.asarray(samples, dtype=np.float64), (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


def ratios(candidate: Sequence[float], reference: Sequence[float]) -> Spread:
    """Candidate over reference, round by round, so that what slows a whole round cancels out."""
    return spread([a / b for a, b in zip(candidate, reference, strict=True)])


def no_progress(_done: int, _total: int) -> None:
    """A `Told` that nobody hears."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one call in each round, by name."""

    samples: Mapping[str, Sequence[float]]

    def seconds(self, name: str) -> Spread:
        """Return the seconds of one call."""
        return spread(self.samples[name])

    def ratio(self, name: str, reference: str) -> Spread:
        """Return the time of one call as a multiple of the reference's."""
        return ratios(self.samples[name], self.samples[reference])


def alternate(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    shortest: float = _SHORTEST,
    clock: Callable[[], float] = time.process_time,
) -> Timed:
    """Call each of `works` in every round, in an order that turns round by round.

    Args:
        works: by name; each is called twice beforehand, to warm up and to be sized.
        rounds: at least 1.
        shortest: seconds of a sample; quicker works are repeated within one.
        clock: by default the processor time of this process: what else runs on the machine then
            costs a kernel its caches, but not its turn.
    """
    repeats = {}
    for name, work in works.items():
        work()
        started = clock()
        work()
        repeats[name] = max(1, math.ceil(shortest / max(clock() - started, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            work, times = works[name], repeats[name]
            started = clock()
            for _ in range(times):
                work()
            samples[name].append((clock() - started) / times)
    return Timed(samples)
