"""Options of a load test and its latency objective."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from service.domain.errors import Invalid

KINDS = ("score", "recommend", "search", "events")
DEFAULT_MIX = "score=4,recommend=2,search=3,events=1"
Arrivals = Literal["poisson", "constant"]


@dataclass(frozen=True, slots=True)
class Slo:
    """An objective: a percentage of all requests succeeds within a number of seconds."""

    percentile: float
    seconds: float

    def is_met(self, share: float) -> bool:
        """Report whether this share of requests that succeeded in time is enough."""
        return share >= self.percentile / 100

    def allowed(self, requests: int) -> int:
        """Return how many of these requests may fail or be slower."""
        return int(requests * (1 - self.percentile / 100) + 1e-9)

    def __str__(self) -> str:
        return f"{self.percentile:g} % within {1e3 * self.seconds:g} ms"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command, by their names."""

    url: str  # without a slash at its end
    rate: float = 50.0  # requests a second; of a ramp, the first
    duration: float = 30.0  # seconds; of each step of a ramp
    warmup: float = 2.0  # seconds of the same load before, excluded from all statistics
    arrivals: Arrivals = "poisson"
    mix: str = DEFAULT_MIX
    headers: Sequence[tuple[str, str]] = ()
    users: int = 200
    targets: int = 100  # items of a score request
    limit: int = 20  # items of a recommendation and of a search
    connections: int = 500  # requests in flight at most; further ones wait, which is latency
    timeout: float = 10.0  # seconds after its due time at which a request fails
    silence: float = 10.0  # seconds without any response after which the load ends
    slo: Slo | None = None
    ramp: bool = False
    most: float = 10_000.0  # requests a second at which a ramp ends
    write_to_users: bool = False
    keep: bool = False  # the events that were written
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; of headers only the names, since the values are secrets."""
        return asdict(self) | {"headers": [name for name, _ in self.headers]}


def parse_url(text: str) -> str:
    """Parse an address, and drop a slash at its end.

    Raises:
        Invalid: for anything but an http or https address.
    """
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise Invalid("--url", f"{text!r} is no address; for example http://127.0.0.1:8000")
    if url.query or url.fragment or url.userinfo:
        raise Invalid("--url", "must have no user, query or fragment; a key is a --header")
    return str(url).rstrip("/")


def parse_mix(text: str) -> dict[str, float]:
    """Parse shares by kind of request, such as `score=4,recommend=2`; a share of 0 is left out.

    Raises:
        Invalid: for an unknown kind, a kind named twice, or a share that is no number.
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in KINDS:
            raise Invalid("--mix", f"{name!r} is no kind of request; those are {', '.join(KINDS)}")
        if name in shares:
            raise Invalid("--mix", f"{name} is there twice")
        if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", value):
            raise Invalid("--mix", f"the share of {name} must be a number, 0 or more: {name}=4")
        shares[name] = float(value)
    shares = {name: share for name, share in shares.items() if share}
    if not shares:
        raise Invalid("--mix", f"has no request; for example {DEFAULT_MIX}")
    return shares


def read_key(file: Path | None, variable: str | None) -> list[tuple[str, str]]:
    """Return the header of an API key: of the file, or else of the variable HEED_API_KEY.

    Raises:
        Invalid: when the file cannot be read, or does not hold one line. The message never repeats
            what it holds.
    """
    source, key = "HEED_API_KEY", (variable or "").strip()
    if file is not None:
        source = "--key-file"
        try:
            key = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Invalid(source, f"{file} cannot be read: {type(error).__name__}") from None
    elif not key:
        return []
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise Invalid(source, "must hold an API key and nothing else")
    return [("Authorization", f"Bearer {key}")]


def parse_headers(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Parse headers written as curl takes them, `Name: value`.

    Raises:
        Invalid: for anything else. The message never repeats a value, which may be a key.
    """
    headers = []
    for number, line in enumerate(lines, start=1):
        name, colon, value = line.partition(":")
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise Invalid("--header", f'number {number} is not of the form "Name: value"')
        if not re.fullmatch(r"[\t\x20-\x7e\xa0-\xff]*", value):
            raise Invalid("--header", f"the value of {name} has a character that no header may")
        headers.append((name, value.strip()))
    return headers
