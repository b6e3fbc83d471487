"""Rate limits of API keys: sliding windows of the library `limits`, or of a shared store."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.strategies import SlidingWindowCounterRateLimiter

from service.domain.errors import RateLimited, StoreUnreachable
from service.domain.keys import ApiKey, Rate
from service.http.access.shared_windows import SharedWindows
from service.stores.values import RateWindows

# A store is not asked for each request: it grants a fiftieth of a rate at once, for a second.
_SHARE = 50
_MOST_GRANTED = 200  # requests
_VALIDITY = 1.0  # seconds


@dataclass
class _Granted:
    """Requests of one key that the store has granted, and that were not sent yet."""

    requests: int = 0
    until: float = 0.0  # monotonic
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class RateLimits:
    """Counts the requests of each key.

    Without a store that counts for several machines, workers share the counters if they are forked
    from the process that made this object. Within any window of a rate, a key has at most its
    amount of requests, as estimated by weighting the window before with the part of it that is
    still inside. While such a store does not answer, each machine counts by itself.
    """

    def __init__(self) -> None:
        self._limiter = SlidingWindowCounterRateLimiter(SharedWindows())
        self._granted: defaultdict[str, _Granted] = defaultdict(_Granted)

    async def count(self, key: ApiKey, rate: Rate, windows: RateWindows | None = None) -> None:
        """Count one request of a key.

        Args:
            key: of the request.
            rate: of the key.
            windows: of a store that counts for several machines.

        Raises:
            RateLimited: the key has sent as many as it may; the request is not counted.
        """
        if windows is not None:
            try:
                wait = await self._take(key, rate, windows)
            except StoreUnreachable:
                wait = self._hit(key, rate)
        else:
            wait = self._hit(key, rate)
        if wait is not None:
            seconds = max(1, math.ceil(wait))
            raise RateLimited(
                f"The API key {key.name} may send {rate} requests; try again in {seconds} s.",
                seconds,
            )

    async def _take(self, key: ApiKey, rate: Rate, windows: RateWindows) -> float | None:
        """Take a request of those that the store granted; else return how long to wait."""
        granted = self._granted[key.key_id]
        async with granted.asking:
            if granted.requests == 0 or time.monotonic() >= granted.until:
                wanted = min(_MOST_GRANTED, max(1, rate.amount // _SHARE))
                granted.requests, wait = await windows.grant(key.key_id, rate, wanted)
                granted.until = time.monotonic() + _VALIDITY
                if granted.requests == 0:
                    return wait
            granted.requests -= 1
            return None

    def _hit(self, key: ApiKey, rate: Rate) -> float | None:
        """Count a request on this machine alone; return how long to wait where it may not be."""
        item = _item(rate)
        if self._limiter.hit(item, key.key_id):
            return None
        return self._limiter.get_window_stats(item, key.key_id).reset_time - time.time()


@cache
def _item(rate: Rate) -> RateLimitItem:
    return RateLimitItemPerSecond(rate.amount, rate.seconds)
