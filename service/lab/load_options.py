"""Options of a load test."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.domain.errors import Invalid

KINDS = ("score", "recommend", "search", "events")
DEFAULT_MIX = "score=4,recommend=2,search=3,events=1"


@dataclass(frozen=True, slots=True)
class Slo:
    """An objective: a percentage of all requests succeeds within a number of seconds."""

    percentile: float
    seconds: float

    def is_met(self, share: float) -> bool:
        return share >= self.percentile / 100

    def allowed(self, requests: int) -> int:
        return int(requests * (1 - self.percentile / 100) + 1e-9)

    def __str__(self) -> str:
        return f"{self.percentile:g} % within {1e3 * self.seconds:g} ms"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command, by their names."""

    url: Annotated[str, typer.Option(help="Of a running service.")] = "http://127.0.0.1:8000"
    rate: Annotated[
        float, typer.Option(min=0.01, help="Requests a second; where a ramp begins.")
    ] = 50.0
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds; of each step of a ramp.")] = (
        30.0
    )
    warmup: Annotated[
        float, typer.Option(min=0, help="Seconds of the same load before, which do not count.")
    ] = 2.0
    arrivals: Annotated[
        Literal["poisson", "constant"],
        typer.Option(help="poisson: at random, as many users come; constant: evenly spaced."),
    ] = "poisson"
    mix: Annotated[str, typer.Option(help="Shares of score, recommend, search and events.")] = (
        DEFAULT_MIX
    )
    header: Annotated[
        list[str] | None,
        typer.Option(help='Of every request, such as "Authorization: Bearer …"; may be repeated.'),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(help="File that holds an API key; otherwise HEED_API_KEY is one."),
    ] = None
    users: Annotated[int, typer.Option(min=1, help="How many users ask, drawn at random.")] = 200
    targets: Annotated[int, typer.Option(min=1, max=1000, help="Items of a score.")] = 100
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Items of a recommendation or a search.")
    ] = 20
    slo_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="Objective: answered with success in this many milliseconds."),
    ] = None
    slo_percentile: Annotated[
        float, typer.Option(min=1, max=100, help="Percentage of all requests that must meet it.")
    ] = 99.0
    ramp: Annotated[
        bool,
        typer.Option(
            "--ramp",
            help="Raise the rate until the objective breaks, and say the highest that held; "
            "without --slo-ms, 50.",
        ),
    ] = False
    max_rate: Annotated[float, typer.Option(min=1, help="Where a ramp ends.")] = 10_000.0
    connections: Annotated[
        int, typer.Option(min=1, help="Most requests with the server at once; more wait.")
    ] = 500
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after it was due when a request has failed.")
    ] = 10.0
    silence: Annotated[
        float, typer.Option(min=0.5, help="Seconds without any answer that end the test.")
    ] = 10.0
    write_to_users: Annotated[
        bool,
        typer.Option(
            "--write-to-users",
            help="Send events for the users that ask, not for users of the test's own.",
        ),
    ] = False
    keep: Annotated[bool, typer.Option("--keep", help="Leave what was written in the service.")] = (
        False
    )
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0

    @property
    def slo(self) -> Slo | None:
        """The objective; a ramp always has one."""
        if self.slo_ms is None and not self.ramp:
            return None
        return Slo(self.slo_percentile, (self.slo_ms or 50.0) / 1e3)

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers of every request, with the API key. Raises `Invalid`."""
        headers = parse_headers(self.header or ())
        if not any(name.lower() == "authorization" for name, _ in headers):
            headers += read_key(self.key_file, os.environ.get("HEED_API_KEY"))
        return headers

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; of headers only the names, since the values are secrets."""
        values = asdict(self)
        del values["header"], values["key_file"]
        return values | {"headers": [name for name, _ in self.headers()]}


def parse_url(text: str) -> str:
    """Parse an address, and drop a slash at its end.

    Raises:
        Invalid: for anything but an http or https address.
    """
    import httpx

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
