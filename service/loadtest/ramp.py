"""The highest rate that an objective holds at: raised until it breaks, then closed in on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

FACTOR = 1.5  # from one step up to the next
NEAR = 1.05  # a rate that broke is so near above one that held: it is found
LEAST = 1.0  # request a second


class Climbed(NamedTuple):
    """Where a ramp ended."""

    held: float | None  # the highest rate that held; None where not even the lowest did
    broke: float | None  # the lowest that broke; None where none did up to the end


async def climb(
    start: float, most: float, attempt: Callable[[float], Awaitable[bool | None]]
) -> Climbed:
    """Raise the rate by half until it breaks, then halve what is between.

    Where `start` breaks already, lower it by half instead until something holds.

    Args:
        start: the first rate, requests a second.
        most: the highest to try.
        attempt: whether a rate held; None ends the ramp.
    """
    held: float | None = None
    broke: float | None = None
    rate = min(start, most)
    while True:
        found = await attempt(rate)
        if found is None:
            return Climbed(held, broke)
        if found:
            held = rate
        else:
            broke = rate
        if broke is None:
            if rate >= most:
                return Climbed(held, broke)
            rate = min(rate * FACTOR, most)
        elif held is None:
            if rate <= LEAST:
                return Climbed(held, broke)
            rate = max(rate / 2, LEAST)
        elif broke <= held * NEAR:
            return Climbed(held, broke)
        else:
            rate = (held * broke) ** 0.5  # halfway by ratio
