"""Rate limits of API keys: sliding windows of the library `limits`."""

from __future__ import annotations

import math
import time
from functools import cache

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.strategies import SlidingWindowCounterRateLimiter

from service.domain.errors import RateLimited
from service.domain.keys import ApiKey, Rate
from service.http.access.shared_windows import SharedWindows


class RateLimits:
    """Counts the requests of each key.

    Workers share the counters if they are forked from the process that made this object. Within
    any window of a rate, a key has at most its amount of requests, as estimated by weighting the
    window before with the part of it that is still inside.
    """

    def __init__(self) -> None:
        self._limiter = SlidingWindowCounterRateLimiter(SharedWindows())

    def count(self, key: ApiKey, rate: Rate) -> None:
        """Count one request of a key.

        Raises:
            RateLimited: the key has sent as many as it may; the request is not counted.
        """
        item = _item(rate)
        if self._limiter.hit(item, key.key_id):
            return
        reset = self._limiter.get_window_stats(item, key.key_id).reset_time - time.time()
        wait = max(1, math.ceil(reset))
        raise RateLimited(
            f"The API key {key.name} may send {rate} requests; try again in {wait} s.", wait
        )


@cache
def _item(rate: Rate) -> RateLimitItem:
    return RateLimitItemPerSecond(rate.amount, rate.seconds)
