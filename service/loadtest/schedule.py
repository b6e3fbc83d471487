"""Schedules: the time and the kind of each request, drawn before the load starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.domain.errors import Invalid
from service.loadtest.options import Arrivals

Floats = NDArray[np.float64]

MAX_REQUESTS = 20_000_000  # of one schedule: each takes some hundred bytes of memory


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests of a load, in the order in which they are sent."""

    kinds: Sequence[str]  # of the mix
    due: Floats  # [N] seconds after the start, ascending
    kind: NDArray[np.int8]  # [N] indexes into `kinds`
    pick: NDArray[np.int64]  # [N] which of the prepared requests of that kind
    warmup: float = 0.0  # seconds; requests due earlier are excluded from all statistics

    def __len__(self) -> int:
        return len(self.due)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """[N] whether a request is due after the warm-up."""
        return self.due >= self.warmup


def arrival_times(
    rate: float, seconds: float, arrivals: Arrivals, rng: np.random.Generator
) -> Floats:
    """Draw ascending times in [0, `seconds`).

    Args:
        rate: requests a second.
        seconds: duration.
        arrivals: constant: one every 1/`rate` seconds. poisson: independent of each other, as
            those of many users are, so that the gaps are exponential.
        rng: source of the times.

    Raises:
        Invalid: for more than `MAX_REQUESTS` of them.
    """
    if rate * seconds > MAX_REQUESTS:
        raise Invalid(
            "--rate", f"{rate:g} a second for {seconds:g} s are more than {MAX_REQUESTS:,} requests"
        )
    if arrivals == "constant":
        return np.arange(np.ceil(rate * seconds), dtype=np.float64) / rate
    # Given their number, the arrivals of a Poisson process are uniform and independent.
    return np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))


def draw_schedule(
    due: Floats,
    shares: Mapping[str, float],
    prepared: int,
    rng: np.random.Generator,
    *,
    warmup: float = 0.0,
) -> Schedule:
    """Draw a kind for each arrival, by its share of the mix, and one of its prepared requests.

    Args:
        due: from `arrival_times`.
        shares: positive numbers by kind.
        prepared: requests of each kind.
        rng: source of the draws.
        warmup: seconds.
    """
    weights = np.array(list(shares.values()), dtype=np.float64)
    kind = rng.choice(len(weights), size=len(due), p=weights / weights.sum()).astype(np.int8)
    return Schedule(list(shares), due, kind, rng.integers(0, prepared, len(due)), warmup)
