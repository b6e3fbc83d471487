"""Schedules: the time and the kind of each request, drawn before the load starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.domain.errors import Invalid
from service.loadtest.options import Options, parse_mix

Floats = NDArray[np.float64]

PREPARED = 1_000  # requests of each kind, which are sent again and again
MAX_REQUESTS = 20_000_000  # of one schedule: each takes some hundred bytes of memory


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests of a load, in the order in which they are sent."""

    kinds: Sequence[str]  # of the mix
    due: Floats  # [N] seconds after the start, ascending
    kind: NDArray[np.int8]  # [N] indexes into `kinds`
    pick: NDArray[np.int64]  # [N] which of the prepared requests of that kind
    warmup: float = 0.0  # seconds; requests due earlier are excluded from all statistics

    @property
    def counted(self) -> NDArray[np.bool_]:
        """[N] whether a request is due after the warm-up."""
        return self.due >= self.warmup


def draw_schedule(rate: float, options: Options) -> Schedule:
    """Draw the due times of a load, a kind for each by its share of the mix, and a request.

    Constant arrivals come every 1/`rate` seconds. Poisson arrivals are independent of each other,
    as those of many users are, so that the gaps are exponential.

    Raises:
        Invalid: for more than `MAX_REQUESTS` of them.
    """
    rng = np.random.default_rng(options.seed)
    seconds, shares = options.warmup + options.duration, parse_mix(options.mix)
    if rate * seconds > MAX_REQUESTS:
        raise Invalid(
            "--rate", f"{rate:g} a second for {seconds:g} s are more than {MAX_REQUESTS:,} requests"
        )
    if options.arrivals == "constant":
        due = np.arange(np.ceil(rate * seconds), dtype=np.float64) / rate
    else:
        # Given their number, the arrivals of a Poisson process are uniform and independent.
        due = np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))
    weights = np.array(list(shares.values()))
    kind = rng.choice(len(weights), size=len(due), p=weights / weights.sum()).astype(np.int8)
    pick = rng.integers(0, PREPARED, len(due))
    return Schedule(list(shares), due, kind, pick, options.warmup)
