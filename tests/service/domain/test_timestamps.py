"""RFC 3339 to microseconds and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.timestamps import (
    MAX_TIMESTAMP,
    MIN_TIMESTAMP,
    from_rfc3339,
    to_rfc3339,
)


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2000-12-31T22:12:40Z", 978_300_760_000_000),
        ("2000-12-31t22:12:40z", 978_300_760_000_000),
        ("2000-12-31 23:12:40.5+01:00", 978_300_760_500_000),
        ("1969-12-31T23:59:59.999999Z", -1),
        ("2000-12-31T22:12:40.1234567891Z", 978_300_760_123_456),
        ("0001-01-01T00:00:00Z", MIN_TIMESTAMP),
        ("9999-12-31T23:59:59.999999Z", MAX_TIMESTAMP),
    ],
)
def test_rfc3339_is_read_as_microseconds(text: str, micros: int) -> None:
    """Each form that RFC 3339 allows gives its known count of microseconds."""
    assert from_rfc3339(text) == micros


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("2000-12-31T22:12:40", "with its zone"),
        ("2000-12-31", "with its zone"),
        ("978300760", "with its zone"),
        ("20001231T221240Z", "with its zone"),
        ("2000-12-31T22:12:40+01", "with its zone"),
        ("2000-12-31T22:12:40+01:75", "with its zone"),
        ("٢٠٠٠-12-31T22:12:40Z", "with its zone"),
        ("2000-12-31T22:12:40Z ", "with its zone"),
        ("2001-02-29T00:00:00Z", "that exists"),
        ("2000-12-31T22:12:60Z", "that exists"),
        ("0001-01-01T00:00:00+01:00", "0001 and 9999"),
    ],
)
def test_what_is_not_a_moment_is_refused(text: str, problem: str) -> None:
    """Times without zone, in other notations, or that never were, are errors and say why."""
    with pytest.raises(ValueError, match=problem):
        from_rfc3339(text)


def test_a_missing_zone_can_be_taken_as_utc() -> None:
    """When asked to, times without zone and dates are read as UTC; other text still fails."""
    assert from_rfc3339("2000-12-31T22:12:40", zone_required=False) == 978_300_760_000_000
    assert from_rfc3339("2000-12-31T23:12:40+01:00", zone_required=False) == 978_300_760_000_000
    assert from_rfc3339("1970-01-02", zone_required=False) == 86_400_000_000
    with pytest.raises(ValueError, match="or a date"):
        from_rfc3339("31.12.2000", zone_required=False)


@given(st.integers(MIN_TIMESTAMP, MAX_TIMESTAMP))
def test_every_timestamp_survives_the_way_out_and_back(micros: int) -> None:
    """Text written from any timestamp a record may hold reads as the same number."""
    assert from_rfc3339(to_rfc3339(micros)) == micros


def test_text_has_a_fraction_only_where_there_is_one() -> None:
    """Whole seconds are written without a fraction, others with six digits, all with Z."""
    assert to_rfc3339(978_300_760_000_000) == "2000-12-31T22:12:40Z"
    assert to_rfc3339(978_300_760_500_000) == "2000-12-31T22:12:40.500000Z"
