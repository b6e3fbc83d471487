"""API keys: tokens, expiry, rates and scopes."""

from __future__ import annotations

import hashlib
import random
import string

import pytest

from service.domain.errors import Invalid
from service.domain.keys import (
    ApiKey,
    Rate,
    Scope,
    issue_key,
    parse_expiry,
    parse_rate,
    parse_token,
)

READ: frozenset[Scope] = frozenset({"read"})
NOW = 1_700_000_000_000_000


def test_only_the_digest_of_the_secret_is_in_the_record() -> None:
    """The record holds SHA-256 of 43 characters that are nowhere else, new ones for each key."""
    issued = [issue_key("shop", READ, NOW) for _ in range(100)]
    assert len({token for _, token in issued}) == 100
    for key, token in issued:
        parsed = parse_token(token)
        assert parsed is not None
        key_id, secret = parsed
        assert (key_id, len(secret)) == (key.key_id, 43)  # base64 of 32 bytes
        assert key.digest == hashlib.sha256(secret.encode()).digest()
        assert secret not in repr(key)
        assert key.matches(secret)


def test_no_changed_token_matches() -> None:
    """A token with one character replaced, anywhere, is another one or none."""
    key, token = issue_key("shop", READ, NOW)
    rng = random.Random(7)
    for place in range(len(token)):
        others = [c for c in string.ascii_letters + string.digits + "-_" if c != token[place]]
        parsed = parse_token(token[:place] + rng.choice(others) + token[place + 1 :])
        assert parsed is None or parsed[0] != key.key_id or not key.matches(parsed[1])


@pytest.mark.parametrize(
    "token", ["", "heed_", "heed_0123456789ab_", "x" * 61, "heed_0123456789ab_" + "é" * 43]
)
def test_other_texts_are_no_tokens(token: str) -> None:
    """A text without the form of a token is none; so is a token with more around it."""
    assert parse_token(token) is None
    whole = issue_key("shop", READ, NOW)[1]
    assert parse_token(whole + "\n") is None
    assert parse_token(" " + whole) is None


@pytest.mark.parametrize(
    ("more", "pointer"),
    [
        ({"name": "Shop"}, "/name"),
        ({"name": ""}, "/name"),
        ({"namespace": "../other"}, "/namespace"),
        ({"scopes": frozenset()}, "/scope"),
        ({"scopes": frozenset({"read", "root"})}, "/scope"),
        ({"expires": NOW}, "/expires"),
    ],
)
def test_a_wrong_field_of_a_key_is_named(more: dict[str, object], pointer: str) -> None:
    """A key with a field that breaks its rule is refused with a pointer to it."""
    fields: dict[str, object] = {"name": "shop", "scopes": READ, "created": NOW, **more}
    with pytest.raises(Invalid) as caught:
        issue_key(**fields)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.pointer == pointer


def test_expiry_is_a_span_or_a_time() -> None:
    """Spans count from now; times need their zone; anything else is refused."""
    day = 86_400 * 1_000_000
    assert parse_expiry("30d", NOW) == NOW + 30 * day
    assert parse_expiry("12h", NOW) == NOW + day // 2
    assert parse_expiry("2w", NOW) == NOW + 14 * day
    assert parse_expiry("2023-11-14T22:13:20Z", NOW) == NOW
    for text in ("", "0d", "-1d", "30", "d", "30 d", "1y", "2027-01-31", "tomorrow"):
        with pytest.raises(Invalid, match="such as 12h, 30d"):
            parse_expiry(text, NOW)
    expires = ApiKey("0" * 12, "a", "default", READ, b"", NOW, NOW + day)
    assert [expires.is_expired(NOW + day + late) for late in (-1, 0)] == [False, True]


def test_rates_round_trip() -> None:
    """A rate is parsed by unit, and its text means the same rate."""
    for text, rate in {
        "100/s": Rate(100, 1),
        "600/minute": Rate(600, 60),
        "5/h": Rate(5, 3600),
        "9/day": Rate(9, 86_400),
    }.items():
        assert parse_rate(text) == rate == parse_rate(str(rate))
    for text in ("", "0/s", "-1/s", "1.5/s", "10", "10/week", "10 /s", "many/s", "1/s/s"):
        with pytest.raises(Invalid, match="100/s"):
            parse_rate(text)


def test_admin_implies_every_scope() -> None:
    """A key permits what names one of its scopes, and an admin's everything."""
    scopes: list[Scope] = ["read", "write", "train", "admin"]
    for held in scopes:
        key, _ = issue_key("shop", frozenset({held}), NOW)
        for needed in scopes:
            assert key.permits(frozenset({needed})) == (held in (needed, "admin"))
    both, _ = issue_key("shop", frozenset({"read", "train"}), NOW)
    assert both.permits(frozenset({"train", "write"}))
