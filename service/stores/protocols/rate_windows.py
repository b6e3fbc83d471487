"""Protocol of the windows in which the requests of API keys are counted for all machines."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from service.domain.keys import Rate


class Grant(NamedTuple):
    """Requests that a key may send now."""

    requests: int
    retry_after: float  # seconds until it may be worth trying again, where there are none


class RateWindows(Protocol):
    """Windows of a store that several machines share."""

    async def grant(self, key_id: str, rate: Rate, wanted: int) -> Grant:
        """Count up to `wanted` requests of a key, as many as its rate leaves.

        Within any window of the rate at most its amount is granted, as estimated by weighting the
        window before with the part of it that is still inside.
        """
        ...
