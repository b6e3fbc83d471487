"""When requests leave and which: decided beforehand, whatever comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.domain.errors import Invalid

Arrivals = Literal["poisson", "constant"]
Floats = NDArray[np.float64]

MOST = 20_000_000  # requests of one schedule: what is noted of each takes memory


@dataclass(frozen=True, slots=True)
class Schedule:
    """One entry for each request, in the order in which they leave."""

    due: Floats  # seconds after the start, ascending
    kinds: NDArray[np.int8]  # what it asks, an index into the kinds of a mix
    picks: NDArray[np.int64]  # which of the requests made beforehand

    def __len__(self) -> int:
        return len(self.due)


def arrivals(rate: float, seconds: float, kind: Arrivals, rng: np.random.Generator) -> Floats:
    """Times in [0, `seconds`), ascending.

    Args:
        rate: requests a second.
        seconds: how long.
        kind: constant: one every 1/`rate` seconds. poisson: independent of each other, as those of
            many users are; the gaps are exponential, so that some come close together.
        rng: of the gaps.

    Raises:
        Invalid: for more than `MOST` of them.
    """
    if rate * seconds > MOST:
        raise Invalid(
            "--rate", f"{rate:g} a second for {seconds:g} s are more than {MOST:,} requests"
        )
    if kind == "constant":
        return np.arange(np.ceil(rate * seconds), dtype=np.float64) / rate
    # Given their number, the arrivals of a Poisson process are uniform and independent.
    return np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))


def schedule(
    due: Floats, shares: Sequence[float], distinct: Sequence[int], rng: np.random.Generator
) -> Schedule:
    """Each arrival asks one kind, drawn by its share, with one of that kind's requests.

    Args:
        due: from `arrivals`.
        shares: of each kind; any positive numbers.
        distinct: requests of each kind that were made beforehand.
        rng: of the draws.
    """
    weights = np.asarray(shares, dtype=np.float64)
    kinds = rng.choice(len(weights), size=len(due), p=weights / weights.sum()).astype(np.int8)
    picks = rng.integers(0, np.asarray(distinct, dtype=np.int64)[kinds])
    return Schedule(due, kinds, picks)
