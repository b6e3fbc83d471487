"""Names that become file names: model versions and jobs.

They come from requests, so the alphabet leaves nothing to a file system: no dot, no slash, no case.
"""

import re
from datetime import UTC, datetime

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
ALLOWED = "1 to 64 of a-z, 0-9, '_' and '-', the first a letter or digit"

_SECOND = 1_000_000


def is_name(text: str) -> bool:
    """True when all of `text`, up to and with its last newline, may name a file."""
    return NAME.fullmatch(text) is not None


def timed_name(created: int) -> str:
    """A name such as `20260101t120000-ab12cd` that sorts by time.

    The hex digits are the microseconds within the second, so that names sort within it too.

    Args:
        created: microseconds since the epoch, UTC.
    """
    seconds, micros = divmod(created, _SECOND)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y%m%dt%H%M%S}-{micros:06x}"
