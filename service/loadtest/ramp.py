"""Search for the highest rate at which an objective is met."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

FACTOR = 1.5  # from one step up to the next
NEAR = 1.05  # the search ends when the lowest failing rate is so near above the highest passing one
LEAST = 1.0  # request a second


async def find_highest_rate(
    start: float, most: float, attempt: Callable[[float], Awaitable[bool | None]]
) -> tuple[float | None, float | None]:
    """Raise the rate by half until it fails, then bisect on a logarithmic scale.

    Where `start` fails already, the rate is halved until it passes.

    Args:
        start: first rate, requests a second.
        most: highest rate to try.
        attempt: whether a rate passes; None ends the search.

    Returns:
        The highest rate that passed and the lowest that failed, each None where there is none.
    """
    held: float | None = None
    broke: float | None = None
    rate = min(start, most)
    while (passed := await attempt(rate)) is not None:
        if passed:
            held = rate
        else:
            broke = rate
        if held is None:
            if rate <= LEAST:
                break
            rate = max(rate / 2, LEAST)
        elif broke is None:
            if rate >= most:
                break
            rate = min(rate * FACTOR, most)
        elif broke <= held * NEAR:
            break
        else:
            rate = (held * broke) ** 0.5
    return held, broke
