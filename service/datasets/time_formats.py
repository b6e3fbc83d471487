"""Formats of times in files: found out from the values of a column, or chosen by the caller."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
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

# The time behind a date, after "T" or a space. Seconds, their fraction and the zone may be missing.
_CLOCK = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:[.,](?P<fraction>\d+))?)?"
    r"(?:\s?(?P<half>[AaPp])\.?[Mm]\.?)?"
    r"\s?(?P<zone>(?:UTC|GMT)?(?P<sign>[+-])(?P<hours>\d\d)(?::?(?P<minutes>\d\d)(?::(?P<seconds>\d\d))?)?"
    r"|[Zz]|UTC|GMT)?",
    re.ASCII,
)
_DAY_END = re.compile(r" |(?<=\d)[Tt](?=\d)")
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)?", re.ASCII)
_SIZES = (("s", 1e11), ("ms", 1e14), ("us", 1e17), ("ns", math.inf))  # numbers are below
_YEARS = (1000, 2200)
_HUGE = 10**21  # nanoseconds beyond the year 9999
_EARLY = 1e8  # seconds: before 1973 only numbers that are no times have fractions


@dataclass(slots=True)
class NonexistentTimes:
    """Local times that no clock shows, since it is put forward over them: count and an example.

    `zoneless` counts times that were written as texts, and taken for UTC.
    """

    count: int = 0
    zoneless: int = 0
    first: str = ""  # as it is written
    first_micros: int = 0  # what it was taken for


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """Format of the times of a file.

    Args:
        pattern: "s", "ms", "us" or "ns" (numbers since the Unix epoch); one of `DATES`, after
            which a time of day with or without seconds may follow; or another pattern of
            `datetime.strptime`.
        zone: of times that name none. Without it, they are refused.
        nonexistent: counts the times converted that do not exist in the zone.
        repeated: counts those that occur twice in the zone.
        example: row from whose size the unit was found out; a number of another unit is refused.
    """

    pattern: str = ISO
    zone: ZoneInfo | None = None
    nonexistent: NonexistentTimes = field(default_factory=NonexistentTimes, compare=False)
    repeated: NonexistentTimes = field(default_factory=NonexistentTimes, compare=False)
    example: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.pattern in UNITS:
            return f"numbers in {self.pattern}"
        zone = "" if self.zone is None else f", in {self.zone.key} where they name no zone"
        return f"{self.pattern}{zone}"

    def micros(self, value: Any) -> int:
        """Convert a value to microseconds since the epoch, UTC.

        Digits beyond microseconds are truncated. A local time that occurs twice, as a clock is put
        back, is the first of both. One that a clock is put forward over is that much later. Both
        are counted.

        Raises:
            ValueError: the value is not of this format; the message says what is.
        """
        if self.example and (unit := unit_by_size(value)) not in (None, self.pattern):
            raise ValueError(
                f"is a time in {unit} by its size, but {self.example} is one in {self.pattern}; "
                f"--time-format {self.pattern} or {unit} says the unit of all"
            )
        if isinstance(value, str):
            if len(value) > MAX_TIME:
                raise ValueError(f"must be a time of at most {MAX_TIME} characters")
            return self._counted(value, *_micros(value.strip(), self.pattern, self.zone))
        if isinstance(value, date):  # from Parquet; a datetime is a date too
            if isinstance(value, datetime):
                return self._counted(value, *_instant(value, self.zone))
            midnight = datetime(value.year, value.month, value.day)  # noqa: DTZ001 (localised)
            return _instant(midnight, self.zone)[0]
        if type(value) in (int, float):
            if self.pattern in UNITS:
                return _since_epoch(value, self.pattern)
            if self.pattern not in DATES or self.pattern == "%Y%m%d":
                return self._counted(value, *_micros(str(value), self.pattern, self.zone))
            raise ValueError(
                f"must be a time as {self}; for numbers, give --time-format s, ms or us"
            )
        raise ValueError(f"must be a time, not {type(value).__name__}")

    def text(self, value: date) -> str:
        """Return a date or a time as RFC 3339 writes it; a time without a zone is taken for UTC."""
        if not isinstance(value, datetime):
            return value.isoformat()
        if value.tzinfo is None and self.zone is None:
            self.nonexistent.zoneless += 1
            value = value.replace(tzinfo=UTC)
        return to_rfc3339(self.micros(value))

    def warning(self) -> str:
        """Return what is odd about the times that were converted; empty without anything."""
        found = self.nonexistent
        if found.zoneless:
            return f"times without a zone: {found.zoneless:,}, taken as UTC; --timezone says theirs"
        if self.zone is None:
            return ""
        kinds = (
            (found, f"times that do not exist in {self.zone.key}, as clocks are put forward"),
            (self.repeated, f"times that occur twice in {self.zone.key}, as clocks are put back"),
        )
        return "; ".join(
            f"{said}: {odd.count:,}: {odd.first!r}, taken as {to_rfc3339(odd.first_micros)}"
            for odd, said in kinds
            if odd.count
        )

    def _counted(self, value: object, micros: int, occurs: int) -> int:
        if occurs != 1:
            found = self.repeated if occurs else self.nonexistent
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


def unit_by_size(value: Any) -> str | None:
    """Return the unit in which a number is a time of our days; None for 0 and what is no number."""
    number = _number(value)
    if not number:
        return None
    return _unit_of(float(number))


def _unit_of(number: float) -> str:
    return next(unit for unit, bound in _SIZES if abs(number) < bound)


def _number(value: Any) -> Decimal | int | None:
    if isinstance(value, str):
        text = value.strip()
        if len(text) > MAX_TIME or not _NUMBER.fullmatch(text):
            return None
        return Decimal(text.replace(",", ".")) if "." in text or "," in text else int(text)
    if type(value) is float and math.isfinite(value):
        return Decimal(repr(value))
    return value if type(value) is int else None


def _unit(values: list[Any]) -> str | None:
    """Return the unit of numbers by their magnitude; None if most values are none.

    Raises:
        Invalid: the numbers are years, or would be times of 1970 as those of spreadsheets.
    """
    numbers = [number for value in values if (number := _number(value)) is not None]
    if 2 * len(numbers) <= len(values):
        return None
    if all(_day(str(number), "%Y%m%d") for number in numbers):
        return None
    largest = max(abs(float(number)) for number in numbers)
    if all(_YEARS[0] <= number < _YEARS[1] and not number % 1 for number in numbers):
        raise Invalid("", f"times such as {values[0]!r} are years: give --time-format %Y")
    if largest < _EARLY and any(number % 1 for number in numbers):
        raise Invalid(
            "",
            f"times such as {values[0]!r} would be of 1970 in seconds, which rarely have fractions "
            "then: write dates, or give --time-format s",
        )
    return _unit_of(largest)


def _since_epoch(value: Any, unit: str) -> int:
    """Return the microseconds of a number or its text; digits beyond them are truncated."""
    number = _number(value)
    if number is None:
        raise ValueError(f"must be a number, a time in {unit}")
    if abs(float(number)) > _HUGE:
        number = _HUGE  # which is refused
    return _in_range(int(number * UNITS[unit] // 1_000))


@lru_cache(_CACHED)
def _micros(text: str, pattern: str, zone: ZoneInfo | None) -> tuple[int, int]:
    """Return a time in microseconds and how often it occurs in its zone; a bare date, once."""
    if pattern in UNITS:
        return _since_epoch(text, pattern), 1
    if pattern not in DATES:
        try:
            return _instant(datetime.strptime(text, pattern), zone)  # noqa: DTZ007 (localised)
        except ValueError:
            raise ValueError(f"must be a time as {pattern}") from None
    day, rest = _split(text, pattern)
    midnight = _strptime(day, pattern)
    clock = _CLOCK.fullmatch(rest) if rest else None
    if midnight is None or (rest and clock is None):
        raise ValueError(
            f"must be a date as {pattern}, and a time of day if there is one, with Z, UTC or an "
            "offset such as +01:00 as its zone"
        )
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
    micros, occurs = _instant(moment, zone)
    return micros, 1 if clock is None else occurs


def _offset(clock: re.Match[str]) -> timezone | None:
    if not clock["zone"]:
        return None
    if not clock["sign"]:
        return UTC
    hours, minutes, seconds = (int(clock[part] or 0) for part in ("hours", "minutes", "seconds"))
    offset = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    return timezone(-offset if clock["sign"] == "-" else offset)


def _instant(moment: datetime, zone: ZoneInfo | None) -> tuple[int, int]:
    occurs = 1
    if moment.tzinfo is None:
        if zone is None:
            raise ValueError("must have a zone, or the file be read with --timezone, such as UTC")
        moment = moment.replace(tzinfo=zone)
        # PEP 495: in a gap the earlier fold has the smaller offset, in a repetition the larger.
        before, after = moment.utcoffset(), moment.replace(fold=1).utcoffset()
        if before is not None and after is not None:
            occurs += (before > after) - (before < after)
    return _in_range(from_datetime(moment)), occurs


def _in_range(micros: int) -> int:
    if not MIN_TIMESTAMP <= micros <= MAX_TIMESTAMP:
        raise ValueError("must lie between the years 0001 and 9999, UTC")
    return micros


def _split(text: str, pattern: str) -> tuple[str, str]:
    if " " in pattern:
        words = text.split()
        count = pattern.count(" ") + 1
        return " ".join(words[:count]), " ".join(words[count:])
    day, *rest = _DAY_END.split(text, maxsplit=1)
    return day, rest[0].strip() if rest else ""


def _day(text: str, pattern: str) -> datetime | None:
    day, rest = _split(text, pattern)
    return _strptime(day, pattern) if not rest or _CLOCK.fullmatch(rest) else None


@lru_cache(_CACHED)
def _strptime(day: str, pattern: str) -> datetime | None:
    try:
        return datetime.strptime(day, pattern)  # noqa: DTZ007 (localised later)
    except ValueError:
        return None
