"""Conversion between microseconds since the Unix epoch (inside) and RFC 3339 (outside)."""

import re
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

# RFC 3339, section 5.6, with the space for "T" that its note allows.
RFC_3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?P<zone>[Zz]|[+-]\d\d:[0-5]\d)?", re.ASCII
)
DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


def from_datetime(moment: datetime) -> int:
    """Return microseconds since the epoch. A moment without a zone is taken as UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - EPOCH) // MICROSECOND


MIN_TIMESTAMP = from_datetime(datetime.min.replace(tzinfo=UTC))  # 0001-01-01T00:00:00Z
MAX_TIMESTAMP = from_datetime(datetime.max.replace(tzinfo=UTC))  # 9999-12-31T23:59:59.999999Z


def from_rfc3339(text: str, *, zone_required: bool = True) -> int:
    """Parse a time such as `2000-12-31T22:12:40.5+01:00` into microseconds since the epoch.

    Digits beyond microseconds are truncated. With `zone_required=False` a time without a zone, or
    a date alone (its midnight), is taken as UTC.

    Raises:
        ValueError: `text` is not such a time; the message names the allowed forms.
    """
    match = RFC_3339.fullmatch(text)
    if zone_required and not (match and match["zone"]):
        raise ValueError("must be an RFC 3339 time with its zone, such as 2000-12-31T22:12:40Z")
    if not match and not DATE.fullmatch(text):
        raise ValueError("must be a time such as 2000-12-31T22:12:40 or a date")
    try:
        micros = from_datetime(datetime.fromisoformat(text.upper()))
    except ValueError as error:
        raise ValueError(f"must be a time that exists: {error}") from None
    if not MIN_TIMESTAMP <= micros <= MAX_TIMESTAMP:  # its zone can move it outside
        raise ValueError("must lie between the years 0001 and 9999, UTC")
    return micros


def to_rfc3339(micros: int) -> str:
    """Format a time such as `2000-12-31T22:12:40.500000Z`; a zero fraction is omitted.

    Raises:
        OverflowError: the time lies outside the years 0001 to 9999.
    """
    return (EPOCH + timedelta(microseconds=micros)).isoformat().removesuffix("+00:00") + "Z"
