"""Kinds of requests, by their routes: which compute, which wait, and which have no deadline."""

from __future__ import annotations

from enum import Enum

from starlette.types import Scope

from service.http.limits import BODY

MAX_SMALL_WRITE = 50  # events or items of a request that is no bulk import


class Kind(Enum):
    """Decides which queue a request waits in, and whether it has a deadline."""

    QUESTION = "question"  # computes an answer that someone waits for
    LIGHT = "light"  # reads or writes single rows; waits for the disk more than it computes
    CATALOGUE = "catalogue"  # waits for the catalogue or a model to be served, without a deadline
    BULK = "bulk"  # many events at once
    IMPORT = "import"  # many items at once, without a deadline

    @property
    def is_urgent(self) -> bool:
        """True if an answer after the deadline is useless.

        An activation reads every byte of a model, and answers before it serves. Writes of items
        answer once the items are served: a bulk import waits, so that searches do not.
        """
        return self not in (Kind.CATALOGUE, Kind.IMPORT)


_QUESTIONS = frozenset({"score", "recommend", "search", "popular", "rows", "attend", "batch"})
_ABOUT = frozenset({"similar", "together", "audience", "affinities"})


def kind_of(scope: Scope) -> Kind:
    """Return the kind of a request, from its method, its path and the rows in its body."""
    body: bytes = scope.get(BODY, b"")
    match scope["method"], scope["path"].removeprefix(scope["root_path"]).split("/"):
        case "POST", ["", "v1", "events"]:
            return Kind.BULK if _is_bulk(body) else Kind.LIGHT
        case "POST", ["", "v1", "items"]:
            return Kind.IMPORT if _is_bulk(body) else Kind.CATALOGUE
        case "POST", ["", "v1", name] if name in _QUESTIONS:
            return Kind.QUESTION
        case (("GET" | "POST"), ["", "v1", "items" | "users", _, name]) if name in _ABOUT:
            return Kind.QUESTION
        case ("GET", ["", "v1", "items" | "users"]) | ("GET", ["", "v1", "users", _, "history"]):
            return Kind.QUESTION  # a page of many rows
        case "POST", ["", "v1", "scenarios", _]:
            return Kind.QUESTION
        case "POST", ["", "v1", "models", _, "activate"]:
            return Kind.CATALOGUE
        case (("DELETE" | "PATCH"), ["", "v1", "items", _]):
            return Kind.CATALOGUE
    return Kind.LIGHT


def _is_bulk(body: bytes) -> bool:
    rows = body.count(b'"item_id"')
    if b"\\u" in body:  # names may be written with escapes: every object may be a row
        rows = max(rows, body.count(b"{") - 1)
    return rows > MAX_SMALL_WRITE
