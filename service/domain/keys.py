"""API keys: records, tokens, scopes and rates.

A token is `heed_ID_SECRET`: the id is public and finds the record, the secret holds 256 random
bits. Only the SHA-256 digest of the secret is stored. A fast hash suffices, since nobody can guess
so many bits; a slow one would cost every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from service.domain.errors import Invalid
from service.domain.names import DEFAULT_NAMESPACE, NAME_RULE, is_name
from service.domain.timestamps import MAX_TIMESTAMP, from_rfc3339

Scope = Literal["read", "write", "train", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "write", "train", "metrics", "admin")

_TOKEN = re.compile(r"heed_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)
_SPAN = re.compile(r"([1-9]\d{0,5})([hdw])", re.ASCII)
_SPANS = {"h": 3_600, "d": 86_400, "w": 604_800}  # seconds
_RATE = re.compile(r"([1-9]\d{0,8})/([a-z]+)", re.ASCII)
_UNITS = {"s": 1, "second": 1, "min": 60, "minute": 60, "h": 3_600, "hour": 3_600}
_UNITS |= {"d": 86_400, "day": 86_400}


class Rate(NamedTuple):
    """A bound of `amount` requests within a window of `seconds`."""

    amount: int
    seconds: int

    def __str__(self) -> str:
        unit = next(name for name, seconds in _UNITS.items() if seconds == self.seconds)
        return f"{self.amount}/{unit}"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The record of a key. Times are in microseconds UTC.

    Revoked keys keep their records, so that an installation that has ever had a key never falls
    back to answering without one.
    """

    key_id: str
    name: str
    namespace: str
    scopes: frozenset[Scope]
    digest: bytes = field(repr=False)  # [32] SHA-256 of the secret
    created: int
    expires: int | None = None
    revoked: int | None = None
    rate: Rate | None = None
    # Id of the namespace that the key was made for; a later one of the same name has another id.
    # Empty for `default`, which is never removed, and for namespaces of earlier versions.
    namespace_id: str = ""

    def matches(self, secret: str) -> bool:
        """Compare a secret with the digest, in a time that does not depend on either."""
        return hmac.compare_digest(hashlib.sha256(secret.encode()).digest(), self.digest)

    def is_expired(self, now: int) -> bool:
        return self.expires is not None and now >= self.expires

    def permits(self, scopes: frozenset[Scope]) -> bool:
        """Report whether the key has any of these scopes; `admin` implies all."""
        return "admin" in self.scopes or not scopes.isdisjoint(self.scopes)


def issue_key(
    name: str,
    scopes: frozenset[Scope],
    created: int,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    expires: int | None = None,
    rate: Rate | None = None,
) -> tuple[ApiKey, str]:
    """Return a new key and its token, which is nowhere else.

    Raises:
        Invalid: naming the field that breaks its rule.
    """
    for pointer, text in (("/name", name), ("/namespace", namespace)):
        if not is_name(text):
            raise Invalid(pointer, f"must be {NAME_RULE}; it is {text!r}")
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        found = f"; it is {', '.join(map(repr, unknown))}" if unknown else ""
        raise Invalid("/scope", f"must be one or more of {', '.join(SCOPES)}{found}")
    if expires is not None and expires <= created:
        raise Invalid("/expires", "must lie in the future")
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    digest = hashlib.sha256(secret.encode()).digest()
    key = ApiKey(key_id, name, namespace, scopes, digest, created, expires, None, rate)
    return key, f"heed_{key_id}_{secret}"


def parse_token(token: str) -> tuple[str, str] | None:
    """Return the id and the secret of a token; None for what has not the form of one."""
    found = _TOKEN.fullmatch(token)
    return None if found is None else (found[1], found[2])


def parse_expiry(text: str, now: int) -> int:
    """Parse `30d`, `12h`, `2w` from `now` on, or an RFC 3339 time, into microseconds UTC.

    Raises:
        Invalid: for any other text.
    """
    span = _SPAN.fullmatch(text)
    if span is not None:
        return min(now + int(span[1]) * _SPANS[span[2]] * 1_000_000, MAX_TIMESTAMP)
    try:
        return from_rfc3339(text)
    except ValueError:
        raise Invalid(
            "/expires",
            f"must be a span such as 12h, 30d or 8w, or an RFC 3339 time with its zone, such as "
            f"2027-01-31T00:00:00Z; it is {text!r}",
        ) from None


def parse_rate(text: str) -> Rate:
    """Parse a rate such as `100/s`, `600/min`, `5000/hour` or `100000/day`.

    Raises:
        Invalid: for any other text.
    """
    found = _RATE.fullmatch(text)
    if found is None or found[2] not in _UNITS:
        raise Invalid("/rate", f"must be such as 100/s, 600/min, 5000/h or 9000/d; it is {text!r}")
    return Rate(int(found[1]), _UNITS[found[2]])
