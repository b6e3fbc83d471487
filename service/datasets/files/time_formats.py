"""Formats of times in files: found out from the values of a column, or chosen by the caller."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from functools import lru_cache
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

from service.domain.errors import Invalid
from service.domain.timestamps import MAX_TIMESTAMP, MIN_TIMESTAMP, from_datetime, to_rfc3339

UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}  # nanoseconds
ISO = "%Y-%m-%d"
DATES = (
    ISO, "%Y/%m/%d", "%Y.%m.%d", "%Y%m%d",
    "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%Y",
    "%d/%m/%y", "%m/%d/%y", "%d-%m-%y", "%m-%d-%y", "%d.%m.%y",
    "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d %Y", "%B %d %Y", "%b %d, %Y",
    "%B %d, %Y", "%a, %d %b %Y",
)  # fmt: skip
MAX_TIME = 100  # characters; caches hold many of them
_CHUNK = 10_000  # values that are looked at before the format is decided, if it can be
_CACHED = 1 << 16

# What may follow a date, after "T" or a space. Seconds, their fraction and the zone may be missing.
_CLOCK = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:[.,](?P<fraction>\d+))?)?"
    r"(?:\s?(?P<half>[AaPp])\.?[Mm]\.?)?"
    r"\s?(?P<zone>[Zz]|UTC|GMT|(?P<sign>[+-])(?P<hours>\d\d):?(?P<minutes>\d\d))?",
    re.ASCII,
)
_DAY_END = re.compile(r" |(?<=\d)[Tt](?=\d)")
_INTEGER = re.compile(r"-?\d+", re.ASCII)


@dataclass(slots=True)
class NonexistentTimes:
    """Local times that no clock shows, since it is put forward over them: count and an example."""

    count: int = 0
    first: str = ""  # as it is written
    first_micros: int = 0  # what it was taken for


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """Format of the times of a file.

    Args:
        pattern: "s", "ms", "us" or "ns" (integers since the Unix epoch); one of `DATES`, after
            which a time of day with or without seconds may follow; or another pattern of
            `datetime.strptime`.
        zone: of times that name none. Without it, they are refused.
        nonexistent: counts the times converted that do not exist in the zone.
    """

    pattern: str = ISO
    zone: ZoneInfo | None = None
    nonexistent: NonexistentTimes = field(default_factory=NonexistentTimes, compare=False)

    def __str__(self) -> str:
        if self.pattern in UNITS:
            return f"integers in {self.pattern}"
        zone = "" if self.zone is None else f", in {self.zone.key} where they name no zone"
        return f"{self.pattern}{zone}"

    def micros(self, value: Any) -> int:
        """Convert a value to microseconds since the epoch, UTC.

        Digits beyond microseconds are truncated. Of a local time that occurs twice as a clock is
        put back, the first is taken. One that a clock is put forward over is that much later, and
        is counted.

        Raises:
            ValueError: the value is not of this format; the message says what is.
        """
        if isinstance(value, str):
            if len(value) > MAX_TIME:
                raise ValueError(f"must be a time of at most {MAX_TIME} characters")
            return self._counted(value, *_micros(value.strip(), self.pattern, self.zone))
        if isinstance(value, date):  # from Parquet; a datetime is a date too
            if isinstance(value, datetime):
                return self._counted(value, *_instant(value, self.zone))
            midnight = datetime(value.year, value.month, value.day)  # noqa: DTZ001 (localised)
            return _instant(midnight, self.zone)[0]
        if type(value) is int:
            if self.pattern in UNITS:
                return _in_range(value * UNITS[self.pattern] // 1_000)
            if self.pattern == "%Y%m%d":
                return self._counted(value, *_micros(str(value), self.pattern, self.zone))
            raise ValueError(
                f"must be a time as {self}; for numbers, give --time-format s, ms or us"
            )
        raise ValueError(f"must be a time, not {type(value).__name__}")

    def warning(self) -> str:
        """Return what is odd about the times that were converted; empty without anything."""
        found = self.nonexistent
        if self.zone is None or not found.count:
            return ""
        return (
            f"times that do not exist in {self.zone.key}, as clocks are put forward: "
            f"{found.count:,}: {found.first!r}, taken as {to_rfc3339(found.first_micros)}"
        )

    def _counted(self, value: object, micros: int, exists: bool) -> int:
        if not exists:
            found = self.nonexistent
            if not found.count:
                found.first, found.first_micros = str(value).strip(), micros
            found.count += 1
        return micros


def chosen_format(pattern: str | None, zone: ZoneInfo | None) -> TimeFormat | None:
    """Return the format that a caller names; None leaves it to `detect_format`.

    Raises:
        Invalid: the pattern is neither a unit, nor rfc3339, nor one of `strptime`.
    """
    if pattern is None:
        return None
    if pattern == "rfc3339":
        return TimeFormat(ISO, zone)
    if pattern not in UNITS and "%" not in pattern:
        allowed = f"rfc3339, {', '.join(UNITS)} or a pattern such as '%d/%m/%Y %H:%M'"
        raise Invalid("", f"--time-format must be {allowed}, not {pattern!r}")
    return TimeFormat(pattern, zone)


def detect_format(values: Iterable[Any], zone: ZoneInfo | None) -> TimeFormat:
    """Find the format that fits most of the values.

    As many values are read as decide it: all of them where days and months could be either.

    Raises:
        Invalid: two formats that mean different times fit equally well, or none fits any value.
    """
    stream, patterns = iter(values), list(DATES)
    fitting = dict.fromkeys(DATES, 0)
    different: set[frozenset[str]] = set()
    first: Any = None
    while chunk := list(islice(stream, _CHUNK)):
        first = chunk[0] if first is None else first
        if unit := _unit(chunk):
            return TimeFormat(unit, zone)
        if isinstance(first, date):
            return TimeFormat(ISO, zone)
        for text in {str(value).strip() for value in chunk}:
            days = {p: day for p in patterns if (day := _day(text, p)) is not None}
            for pattern in days:
                fitting[pattern] += 1
            different |= {frozenset((a, b)) for a in days for b in days if days[a] != days[b]}
        most = max(fitting.values())
        patterns = [pattern for pattern in patterns if fitting[pattern]]
        best = [pattern for pattern in patterns if fitting[pattern] == most]
        if len(best) == 1 or (best and not _differ(best, different)):
            return TimeFormat(best[0], zone)
    if first is None:
        return TimeFormat(ISO, zone)
    if not any(fitting.values()):
        raise Invalid("", f"no known format of times fits {first!r}: give --time-format")
    ways = " or ".join(repr(pattern) for pattern in best)
    raise Invalid("", f"times such as {first!r} may be {ways}: give --time-format")


def _differ(patterns: list[str], different: set[frozenset[str]]) -> bool:
    return any(frozenset((a, b)) in different for a in patterns for b in patterns if a != b)


def _unit(values: list[Any]) -> str | None:
    """Return the unit of integers by their magnitude; None if most values are none."""
    integers = [
        int(value)
        for value in values
        if type(value) is int or (isinstance(value, str) and _INTEGER.fullmatch(value.strip()))
    ]
    if 2 * len(integers) <= len(values):
        return None
    if all(_day(str(value), "%Y%m%d") for value in integers):
        return None
    largest = max(map(abs, integers))
    for unit, bound in (("s", 1e11), ("ms", 1e14), ("us", 1e17)):
        if largest < bound:
            return unit
    return "ns"


@lru_cache(_CACHED)
def _micros(text: str, pattern: str, zone: ZoneInfo | None) -> tuple[int, bool]:
    """Return a time in microseconds, and whether it exists in its zone, as any date alone does."""
    if pattern in UNITS:
        if not _INTEGER.fullmatch(text):
            raise ValueError(f"must be an integer, a time in {pattern}")
        return _in_range(int(text) * UNITS[pattern] // 1_000), True
    if pattern not in DATES:
        try:
            return _instant(datetime.strptime(text, pattern), zone)  # noqa: DTZ007 (localised)
        except ValueError:
            raise ValueError(f"must be a time as {pattern}") from None
    day, rest = _split(text, pattern)
    midnight = _strptime(day, pattern)
    clock = _CLOCK.fullmatch(rest) if rest else None
    if midnight is None or (rest and clock is None):
        raise ValueError(f"must be a date as {pattern}, and a time of day if there is one")
    moment = midnight
    if clock is not None:
        fraction = (clock["fraction"] or "")[:6].ljust(6, "0")
        hour = int(clock["hour"])
        if clock["half"]:
            if not 1 <= hour <= 12:
                raise ValueError("must have an hour from 1 to 12 before am or pm")
            hour = hour % 12 + 12 * (clock["half"] in "Pp")
        moment = moment.replace(
            hour=hour, minute=int(clock["minute"]), second=int(clock["second"] or 0),
            microsecond=int(fraction), tzinfo=_offset(clock),
        )  # fmt: skip
    micros, exists = _instant(moment, zone)
    return micros, exists or clock is None


def _offset(clock: re.Match[str]) -> timezone | None:
    if not clock["zone"]:
        return None
    if not clock["sign"]:
        return UTC
    offset = timedelta(hours=int(clock["hours"]), minutes=int(clock["minutes"]))
    return timezone(-offset if clock["sign"] == "-" else offset)


def _instant(moment: datetime, zone: ZoneInfo | None) -> tuple[int, bool]:
    exists = True
    if moment.tzinfo is None:
        if zone is None:
            raise ValueError("must have a zone, or the file be read with --timezone, such as UTC")
        moment = moment.replace(tzinfo=zone)
        # PEP 495: in a gap the earlier fold has the smaller offset, in a repetition the larger.
        before, after = moment.utcoffset(), moment.replace(fold=1).utcoffset()
        exists = before is None or after is None or before >= after
    return _in_range(from_datetime(moment)), exists


def _in_range(micros: int) -> int:
    if not MIN_TIMESTAMP <= micros <= MAX_TIMESTAMP:
        raise ValueError("must lie between the years 0001 and 9999, UTC")
    return micros


def _split(text: str, pattern: str) -> tuple[str, str]:
    """Split a time into its date and the rest, which may be empty."""
    if " " in pattern:
        words = text.split()
        count = pattern.count(" ") + 1
        return " ".join(words[:count]), " ".join(words[count:])
    day, *rest = _DAY_END.split(text, maxsplit=1)
    return day, rest[0].strip() if rest else ""


def _day(text: str, pattern: str) -> datetime | None:
    """Return the midnight of a time's date, or None if the text is not of the pattern."""
    day, rest = _split(text, pattern)
    return _strptime(day, pattern) if not rest or _CLOCK.fullmatch(rest) else None


@lru_cache(_CACHED)
def _strptime(day: str, pattern: str) -> datetime | None:
    try:
        return datetime.strptime(day, pattern)  # noqa: DTZ007 (localised later)
    except ValueError:
        return None
