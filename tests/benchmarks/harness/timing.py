"""Timing of reference and candidate in turns: ratios of one run, as medians with quartiles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
_SHORTEST = 2e-3  # seconds that one sample lasts at least: a shorter call is repeated within it


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float


def spread(samples: Sequence[float]) -> Spread:
    """The median and quartiles of samples, of which there is at least one."""
    low, median, high = np.quantile(np.asarray(samples, dtype=np.float64), (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


def ratios(candidate: Sequence[float], reference: Sequence[float]) -> Spread:
    """Candidate over reference, round by round, so that what slows a whole round cancels out."""
    return spread([a / b for a, b in zip(candidate, reference, strict=True)])


def rotated(subjects: Sequence[T], turn: int) -> list[T]:
    """Return the subjects in the order of a turn: another one is the first each time."""
    first = turn % len(subjects)
    return [*subjects[first:], *subjects[:first]]


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
    clock: Callable[[], float] = time.process_time,
) -> Timed:
    """Call each of `works` in every round, in an order that turns round by round.

    Args:
        works: by name; each is called twice beforehand, to warm up and to be sized.
        rounds: at least 1.
        clock: by default the processor time of this process: what else runs on the machine then
            costs a kernel its caches, but not its turn.
    """
    repeats = {}
    for name, work in works.items():
        work()
        started = clock()
        work()
        repeats[name] = max(1, math.ceil(_SHORTEST / max(clock() - started, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name in rotated(list(works), turn):
            work, times = works[name], repeats[name]
            started = clock()
            for _ in range(times):
                work()
            samples[name].append((clock() - started) / times)
    return Timed(samples)
