"""What a load test asks about, found over the public API; and what it wrote, taken away again."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np

from service.domain.errors import Invalid, NotFound, Unavailable

Told = Callable[[int, int], None]  # how much is done, and of how much

OWN = "loadtest-"  # how the users and events of load tests begin
_PAGE = 1_000
_PAGES = 20  # of each list: enough to draw from, and soon read
_PATIENCE = 30.0  # seconds for one answer, outside of the load
_GAUGE = re.compile(r"^heed_(items|users|events) ([0-9.e+]+)$", re.MULTILINE)


def silent(_done: int, _total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class Material:
    """What there is to ask about."""

    users: Sequence[str]  # drawn from those that are stored
    histories: Sequence[int]  # events of each of them; 1,000 stands for that many and more
    items: Sequence[str]  # that are offered
    queries: Sequence[str]  # some words of titles
    counts: Mapping[str, int]  # items, users and events that the server says it has
    server: Mapping[str, Any]  # its version

    def as_dict(self) -> dict[str, Any]:
        """What a report says of it."""
        low, median, high = np.quantile(self.histories or [0], (0.0, 0.5, 1.0)).tolist()
        return {
            **self.counts,
            "asking_users": len(self.users),
            "history_lengths": {"least": int(low), "median": median, "most": int(high)},
            "asked_items": len(self.items),
            "queries": len(self.queries),
            **self.server,
        }


def client(url: str, headers: Sequence[tuple[str, str]]) -> httpx.Client:
    """For what is asked before and after the load; the caller closes it."""
    return httpx.Client(base_url=url, headers=list(headers), timeout=_PATIENCE)


def gather(
    http: httpx.Client, *, users: int, queries: int = 2_000, seed: int = 0, told: Told = silent
) -> Material:
    """Draw users and items of a running service, and words of its titles.

    The first 20,000 of each list are drawn from.

    Args:
        http: of `client`.
        users: at most how many to draw.
        queries: how many to make.
        seed: of what is drawn.
        told: how many users' histories were looked at.

    Raises:
        NotFound: when there are no items to ask about, or no users.
        Unavailable: when the service refuses, or is none.
    """
    rng = random.Random(seed)
    listed = [each for each in _pages(http, "items") if not each["hidden"]]
    if not listed:
        raise NotFound(f"{http.base_url} has no items to ask about; import a catalogue first")
    names = [each["user_id"] for each in _pages(http, "users")]
    # A load test that was killed may have left its own.
    names = [name for name in names if not name.startswith(OWN)]
    if not names:
        raise NotFound(f"{http.base_url} has no users to ask for; import events first")
    chosen = rng.sample(names, min(users, len(names)))
    lengths = []
    for number, name in enumerate(chosen):
        told(number, len(chosen))
        path = f"/v1/users/{quote(name, safe='')}/history"
        lengths.append(len(_json(http, path, limit=_PAGE)["events"]))
    titles = [words for each in listed if (words := each["title"].split())]
    made = [_part(rng.choice(titles), rng) for _ in range(queries)] if titles else []
    return Material(
        users=chosen,
        histories=lengths,
        items=[each["item_id"] for each in listed],
        queries=list(dict.fromkeys(made)),
        counts=_counts(http, len(listed), len(names)),
        server={"heed": _version(http)},
    )


class Written:
    """The users and events that a load test writes, which are named so that they can be found.

    Args:
        count: how many users of its own; with `lent`, none.
        lent: users of the service whose histories get the events instead.
    """

    def __init__(self, count: int, lent: Sequence[str] = ()) -> None:
        self.run = secrets.token_hex(4)
        self.lent = bool(lent)
        self.users = list(lent) or [f"{OWN}{self.run}-{number}" for number in range(count)]
        self.events: dict[int, int] = {}  # number of an event, to the user it was sent for

    def event_id(self, number: int) -> str:
        """All are of one length, so that one request is a pattern for all."""
        return f"{OWN}{self.run}-{number:010d}"

    def paths(self) -> list[str]:
        """What to DELETE: users of its own, or else single events of others."""
        if not self.lent:
            used = sorted(set(self.events.values()))
            return [f"/v1/users/{self.users[each]}" for each in used]
        return [
            f"/v1/users/{quote(self.users[user], safe='')}/history/{self.event_id(number)}"
            for number, user in sorted(self.events.items())
        ]


def clean(http: httpx.Client, paths: Sequence[str], told: Told = silent) -> list[str]:
    """DELETE each path; those that could not be.

    A service that does not answer is asked once, not once for each.
    """
    for number, path in enumerate(paths):
        told(number, len(paths))
        try:
            status = http.delete(path).status_code
        except (httpx.HTTPError, KeyboardInterrupt):
            return list(paths[number:])
        if status not in (200, 204, 404):  # an event that was refused is not there
            return list(paths[number:])
    told(len(paths), len(paths))
    return []


def parsed_headers(given: Sequence[str]) -> list[tuple[str, str]]:
    """`Name: value`, as curl has them. Raises `Invalid` for anything else."""
    found = []
    for number, text in enumerate(given, start=1):
        name, colon, value = text.partition(":")
        # What it says may be a key, and so is not repeated.
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise Invalid("--header", f'number {number} is not of the form "Name: value"')
        if not re.fullmatch(r"[\t\x20-\x7e\xa0-\xff]*", value):
            raise Invalid("--header", f"the value of {name} holds what no header may")
        found.append((name, value.strip()))
    return found


# ------------------------------------------------------------------------------ the parts


def _json(http: httpx.Client, path: str, **params: Any) -> Any:
    try:
        answer = http.get(path, params=params)
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise Unavailable(f"{http.base_url} does not answer: {why}") from None
    if answer.status_code in (401, 403):
        raise Unavailable(
            f"GET {path} was answered with {answer.status_code}: give your key as "
            '--header "Authorization: Bearer …"'
        )
    try:
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPStatusError, ValueError):
        raise Unavailable(
            f"GET {http.base_url}{path.lstrip('/')} was answered with {answer.status_code}: "
            f"{answer.text[:300]!r}; is this the address of a Heed?"
        ) from None


def _pages(http: httpx.Client, what: str) -> Iterator[Any]:
    cursor: dict[str, str] = {}
    for _ in range(_PAGES):
        page = _json(http, f"/v1/{what}", limit=_PAGE, **cursor)
        yield from page[what]
        if page["cursor"] is None:
            return
        cursor = {"cursor": page["cursor"]}


def _part(words: Sequence[str], rng: random.Random) -> str:
    """One to three words that follow each other, as somebody might search for."""
    length = min(len(words), rng.randint(1, 3))
    start = rng.randint(0, len(words) - length)
    return " ".join(words[start : start + length])


def _counts(http: httpx.Client, items: int, users: int) -> dict[str, int]:
    """What /metrics says; where that is not to be had, what was listed, which may not be all."""
    try:
        said = http.get("/metrics").text
    except httpx.HTTPError:
        said = ""
    found = {name: int(float(value)) for name, value in _GAUGE.findall(said)}
    return {"items": items, "users": users} | found


def _version(http: httpx.Client) -> str:
    """What /openapi.json says; a proxy may hide it."""
    try:
        return str(http.get("/openapi.json").json()["info"]["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return "of unknown version"
