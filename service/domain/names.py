"""Names that become file names: namespaces, model versions and jobs.

Requests contain them, so the alphabet excludes all that file systems interpret: dots, slashes and
upper case.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from service.domain.timestamps import EPOCH, MICROSECOND

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_TIMESTAMPED = re.compile(r"\d{8}t\d{6}-[0-9a-f]{6}", re.ASCII)
DEFAULT_NAMESPACE = "default"
NAMESPACE_VARIABLE = "HEED_NAMESPACE"  # of commands; a service serves every namespace
NAME_RULE = "1 to 64 of a-z, 0-9, '_' and '-', the first a letter or digit"


def is_name(text: str) -> bool:
    """Report whether the whole of `text` is a valid name; a trailing newline makes it invalid."""
    return NAME_PATTERN.fullmatch(text) is not None


def timestamped_name(created: int) -> str:
    """Return a name such as `20260101t120000-ab12cd` that sorts by time.

    The hex digits are the microseconds within the second, so that names sort within it too.
    `created` is in microseconds since the epoch, UTC.
    """
    moment = EPOCH + created * MICROSECOND
    return f"{moment:%Y%m%dt%H%M%S}-{moment.microsecond:06x}"


def next_time(now: int, names: Iterable[str]) -> int:
    """Return `now`, or the microsecond after the latest of the timestamped names if that is later.

    The name that is made of it sorts after all others, also where the clock was set back since.
    """
    times = [_time_of(name) for name in names if _TIMESTAMPED.fullmatch(name)]
    return max([now, *(time + 1 for time in times)])


def _time_of(name: str) -> int:
    """Return the microseconds of a timestamped name; 0 where it only looks like one."""
    second, _, microsecond = name.partition("-")
    try:
        moment = datetime.strptime(second, "%Y%m%dt%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return 0
    return (moment - EPOCH) // MICROSECOND + min(int(microsecond, 16), 999_999)
