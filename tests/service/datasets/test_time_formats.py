"""Formats of times, against times that were written in them."""

import random
from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.datasets.time_formats import (
    DATES,
    ISO,
    TimeFormat,
    chosen_format,
    detect_format,
)
from service.domain.errors import Invalid
from service.domain.timestamps import from_datetime

pytestmark = pytest.mark.verify

LONDON = ZoneInfo("Europe/London")
CLOCKS = {
    "": timedelta(days=1),
    " %H:%M": timedelta(minutes=1),
    "T%H:%M:%S": timedelta(seconds=1),
    " %H:%M:%S.%f": timedelta(microseconds=1),
    " %I:%M %p": timedelta(minutes=1),
    " %I:%M:%S%p": timedelta(seconds=1),
}


def cut(moment: datetime, unit: timedelta) -> datetime:
    return moment - (moment - datetime(1970, 1, 1)) % unit  # noqa: DTZ001 (local times)


@given(
    st.datetimes(datetime(1970, 1, 2), datetime(2067, 1, 1)),  # noqa: DTZ001 (local times)
    st.sampled_from(DATES),
    st.sampled_from(sorted(CLOCKS)),
    st.sampled_from([None, "Z", "+01:00", "-0530", " UTC"]),
)
def test_written_times_are_read(moment: datetime, date: str, clock: str, zone: str | None) -> None:
    """Every date with every time of day, in its own zone or in the caller's, is that instant."""
    written = cut(moment, CLOCKS[clock])
    if " " in date:
        clock = clock.replace("T", " ")
    text = written.strftime(date + clock) + (zone or "" if clock else "")
    offset: timezone | ZoneInfo = LONDON
    if zone and clock:
        hours = {"+01:00": 1, "-0530": -5.5}.get(zone, 0)
        offset = timezone(timedelta(hours=hours))
    expected = from_datetime(written.replace(tzinfo=offset))
    assert TimeFormat(date, LONDON).micros(text) == expected


@pytest.mark.parametrize("date", DATES)
@pytest.mark.parametrize("clock", sorted(CLOCKS))
def test_the_format_of_a_column_is_found(date: str, clock: str) -> None:
    """Of times all over a year, the format that wrote them is found, or one that reads the same."""
    source = random.Random(date + clock)
    if " " in date:
        clock = clock.replace("T", " ")
    moments = [
        datetime(2011, 1, 1, tzinfo=UTC) + timedelta(minutes=source.randrange(525_600))
        for _ in range(300)
    ]
    texts = [moment.strftime(date + clock) for moment in moments]
    found = detect_format([*texts, "n.d.", ""], ZoneInfo("UTC"))
    written = TimeFormat(date, ZoneInfo("UTC"))
    assert [found.micros(text) for text in texts] == [written.micros(text) for text in texts]


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ([0, 1, 2], "s"),
        (["881250949", "881250950"], "s"),
        ([978_300_760_500], "ms"),
        ([978_300_760_500_000], "us"),
        ([978_300_760_500_000_000], "ns"),
        ([20240131, 20240201], "%Y%m%d"),
        ([], ISO),
        (["01/02/2011", *["02/02/2011"] * 20_000, "13/02/2011"], "%d/%m/%Y"),
    ],
)
def test_units_and_late_evidence(values: list[object], pattern: str) -> None:
    """Integers have the unit of their magnitude; a day beyond the twelfth decides, wherever."""
    assert detect_format(values, LONDON).pattern == pattern


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2024-03-15 10:20:33.123456+00", "2024-03-15T10:20:33.123456+00:00"),
        ("2024-03-15 10:20:33+01", "2024-03-15T10:20:33+01:00"),
        ("2024-03-15 10:20:33.5+05:30", "2024-03-15T10:20:33.5+05:30"),
        ("1880-03-15 10:20:33-00:25:21", "1880-03-15T10:20:33-00:25:21"),
        ("2024-03-15 10:20:33.123456 UTC", "2024-03-15T10:20:33.123456+00:00"),
        ("2024-03-15 10:20:33 GMT+0100", "2024-03-15T10:20:33+01:00"),
        ("1433221332.117", "2015-06-02T05:02:12.117+00:00"),
        ("1433221332117.5", "2015-06-02T05:02:12.1175+00:00"),
        (1433221332.117, "2015-06-02T05:02:12.117+00:00"),
    ],
)
def test_times_of_databases_and_programs_are_read(text: str | float, moment: str) -> None:
    """Offsets of PostgreSQL, zones behind a space, and epochs with a fraction."""
    expected = from_datetime(datetime.fromisoformat(moment))
    assert detect_format([text], None).micros(text) == expected


@pytest.mark.parametrize(
    ("value", "advice"), [("45366.43", "--time-format s"), (1995, "years: give --time-format %Y")]
)
def test_numbers_that_would_be_times_of_1970_are_refused(value: str | int, advice: str) -> None:
    """Days of spreadsheets and years; the advice works."""
    with pytest.raises(Invalid, match=advice):
        detect_format([value], LONDON)
    year = chosen_format("%Y", ZoneInfo("UTC"))
    assert year is not None
    assert year.micros(1995) == year.micros("1995") == 788_918_400_000_000


def test_times_that_may_be_either_are_refused() -> None:
    """Days and months that cannot be told apart are not guessed, unless they are the same."""
    with pytest.raises(Invalid, match=r"'01/02/2011' may be '%d/%m/%Y' or '%m/%d/%Y'"):
        detect_format(["01/02/2011", "03/03/2011"], LONDON)
    assert detect_format(["03/03/2011"], LONDON).micros("03/03/2011") == 1_299_110_400_000_000
    with pytest.raises(Invalid, match="no known format of times fits 'soon'"):
        detect_format(["soon"], LONDON)


def test_times_that_a_clock_is_put_forward_over_are_counted() -> None:
    """A local time that does not exist is as long after the change as before; the first is told."""
    times = TimeFormat("%d/%m/%Y", LONDON)
    for text in ("27/03/2011 00:59", "27/03/2011 02:00", "30/10/2011 02:30", "27/03/2011 01:30Z"):
        times.micros(text)
    assert times.warning() == ""
    for _ in range(2):  # of which the second is not converted again
        moment = times.micros("27/03/2011 01:30")
        assert moment == from_datetime(datetime(2011, 3, 27, 1, 30, tzinfo=UTC))
        assert moment == times.micros("27/03/2011 02:30")
    times.micros(datetime(2012, 3, 25, 1))  # noqa: DTZ001 (of Parquet)
    assert times.warning() == (
        "times that do not exist in Europe/London, as clocks are put forward: 3: "
        "'27/03/2011 01:30', taken as 2011-03-27T01:30:00Z"
    )
    twice = TimeFormat("%d.%m.%Y", ZoneInfo("Europe/Berlin"))
    first = datetime(2024, 10, 27, 0, 30, tzinfo=UTC)
    assert twice.micros("27.10.2024 02:30") == from_datetime(first)
    twice.micros("27.10.2024 03:00")
    twice.micros("27.10.2024")
    assert twice.warning() == (
        "times that occur twice in Europe/Berlin, as clocks are put back: 1: "
        "'27.10.2024 02:30', taken as 2024-10-27T00:30:00Z"
    )
    begins = TimeFormat(ISO, ZoneInfo("America/Sao_Paulo"))  # whose clocks changed at midnight
    assert begins.micros("2011-10-16") == begins.micros(date(2011, 10, 16))
    assert begins.warning() == ""  # a day exists though its midnight does not


def test_every_minute_of_a_change_is_told_apart() -> None:
    """Of a day that is put forward, the times that are counted are those of no instant."""
    midnight = datetime(2011, 3, 26, 23, tzinfo=UTC)
    shown = {
        (midnight + timedelta(minutes=n)).astimezone(LONDON).strftime("%Y-%m-%d %H:%M")
        for n in range(6 * 60)
    }
    for minute in range(4 * 60):
        text = f"2011-03-27 {minute // 60:02}:{minute % 60:02}"
        times = TimeFormat(ISO, LONDON)
        times.micros(text)
        assert (times.warning() == "") == (text in shown)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (ISO, "2011-02-30"), (ISO, "2011-02-03 24:00"), (ISO, "2011-02-03 13:00 pm"),
        (ISO, "2011-02-03 noon"), ("s", "1.5.0"), ("s", "1e9"), ("%H:%M %d.%m.%Y", "2011"),
        (ISO, ""),
    ],
)  # fmt: skip
def test_what_is_no_time_is_refused(pattern: str, text: str) -> None:
    """Days of no month and hours of no day are errors, not other days and hours."""
    with pytest.raises(ValueError, match="must"):
        TimeFormat(pattern, LONDON).micros(text)


def test_a_chosen_format_is_checked() -> None:
    """A pattern of strptime is taken as it is; a word that is none is refused."""
    chosen = chosen_format("%H:%M %d.%m.%Y", LONDON)
    assert chosen is not None
    assert chosen.micros("08:26 01.12.2010") == 1_291_191_960_000_000
    assert chosen_format(None, LONDON) is None
    assert chosen_format("rfc3339", None) == TimeFormat()
    with pytest.raises(Invalid, match="--time-format must be rfc3339, s, ms, us, ns or a pattern"):
        chosen_format("moon", None)
