"""Events that were stored without a time: they have that of the batch they arrived in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.data.log_shards import WHOLE_LOG, LogShards

_HOUR = 3_600_000_000  # microseconds; in less than that a file is imported
_AT_ONCE = 10  # events at one time, on average, that no log of what people do has for an hour
_SMALLEST = 10  # one in so many events of a log that are an import of part of it


def lacks_order(imported: NDArray[np.bool_], shards: LogShards = WHOLE_LOG) -> bool:
    """Report whether half of the events of a log [E] or more have the time of an import."""
    total = shards.total(len(imported))
    return total > 0 and 2 * shards.total(int(np.count_nonzero(imported))) >= total


def at_import(
    times: NDArray[np.int64], shards: LogShards = WHOLE_LOG, *, is_part: bool = False
) -> NDArray[np.bool_]:
    """Mark events [E] whose time, microseconds UTC, is that of their import; collective.

    An import is an hour with ten events or more for each of its times, if it has half of all
    events, or a tenth at times with a part below a millisecond. The service's clock gives such
    times; exports have dates, and whole seconds or milliseconds. Part of a log may have half of its
    events at one date: there, only times below a millisecond tell.
    """
    found = np.zeros(len(times), np.bool_)
    total = shards.total(len(times))
    is_clock = times % 1_000 != 0
    for share, among in ((2, is_clock | (not is_part)), (_SMALLEST, is_clock)):
        while (start := _import_hour(times[among & ~found], total / share, shards)) is not None:
            found |= among & (times >= start) & (times < start + _HOUR)
    return found


def _import_hour(times: NDArray[np.int64], least: float, shards: LogShards) -> int | None:
    """Return when an hour of an import begins that has at least so many events; None if none."""
    times = np.sort(times)
    until = np.searchsorted(times, times + _HOUR, side="left")
    fullest = int(np.argmax(until - np.arange(len(times)))) if len(times) else 0
    for start in shards.gather(times[fullest : fullest + 1]).tolist():
        within = times[np.searchsorted(times, start) : np.searchsorted(times, start + _HOUR)]
        count = shards.total(len(within))
        distinct = shards.max(len(np.unique(within)))
        if count and count >= least and count >= _AT_ONCE * distinct:
            return int(start)
    return None
