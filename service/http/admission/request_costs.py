"""Costs of requests: a table of where each belongs, its size, and measured seconds for each unit.

A request's size is counted in the bytes of its body, without parsing it: a request that is refused
must cost next to nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from starlette.types import Scope

from service.http.limits import BODY

MAX_SMALL_WRITE = 50  # events or items of a request that is no bulk import
_WEIGHT = 0.1  # of a new measurement in the mean
_MAX_JUMP = 10.0  # times the mean that one measurement counts at most


class Priority(IntEnum):
    """Lanes of the work queue, the most urgent first."""

    QUESTION = 0  # computes an answer that someone waits for
    LIGHT = 1  # reads or writes single rows; waits for the disk more than it computes
    CATALOGUE = 2  # waits for the catalogue or a model to be served, and has no deadline
    BULK = 3  # many events at once
    IMPORT = 4  # many items at once, without a deadline


class Work(NamedTuple):
    """What a request asks for: its kind, its size in units, and its priority."""

    kind: str
    units: float
    priority: Priority

    @property
    def is_urgent(self) -> bool:
        """True for what is of no use after the deadline.

        An activation reads every byte of a model, and answers before it serves. Writes of items
        answer once the items are served: a bulk import waits, so that searches do not.
        """
        return self.priority not in (Priority.CATALOGUE, Priority.IMPORT)


class RequestCosts:
    """Expected seconds of service by kind, means of what was measured, weighted to the present."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # for each unit

    def expected(self, work: Work) -> float:
        """Seconds of service that a request is expected to take."""
        known = self._seconds.get(work.kind)
        return work.units * (_seed(work.kind) if known is None else known)

    def observe(self, work: Work, seconds: float) -> None:
        """Take into account what a request took; one extreme value counts only so much."""
        mean = self.expected(work) / work.units
        found = min(seconds / work.units, _MAX_JUMP * mean)
        self._seconds[work.kind] = mean + _WEIGHT * (found - mean)


# Seconds for each unit until there are measurements, on one core of a small machine.
_SEEDS = {
    "score": 0.003,
    "recommend": 0.005,
    "search": 0.005,
    "similar": 0.005,
    "popular": 0.003,
    "rows": 0.03,
    "attend": 0.005,
    "audience": 0.01,
    "affinities": 0.005,
    "together": 0.005,
    "scenario": 0.01,
    "batch": 0.005,
    "bulk events": 0.003,
    "bulk items": 0.01,
}
_SEED = 0.001  # of any other kind
_EXPLAINED, _EFFECTS = "explained", "effects"
_FACTORS = {_EXPLAINED: 4.0, _EFFECTS: 8.0}  # to the seed of the same question
_QUESTIONS = frozenset({"score", "recommend", "search", "popular", "rows", "attend"})
_ABOUT = frozenset({"similar", "together", "audience", "affinities"})


def classify(scope: Scope) -> Work:
    """Say what a request costs by, from its method, its path and its body's bytes."""
    method: str = scope["method"]
    body: bytes = scope.get(BODY, b"")
    match method, scope["path"].removeprefix(scope["root_path"]).split("/"):
        case "POST", ["", "v1", "events"]:
            return _write("events", body, Priority.LIGHT, Priority.BULK)
        case "POST", ["", "v1", "items"]:
            return _write("items", body, Priority.CATALOGUE, Priority.IMPORT)
        case "POST", ["", "v1", "batch"]:
            return Work("batch", max(1, body.count(b'"path"')), Priority.QUESTION)
        case "POST", ["", "v1", name] if name in _QUESTIONS:
            return _question(name, body)
        case (("GET" | "POST"), ["", "v1", "items" | "users", _, name]) if name in _ABOUT:
            return Work(name, 1, Priority.QUESTION)
        case "POST", ["", "v1", "scenarios", _]:
            return Work("scenario", 1, Priority.QUESTION)
        case "POST", ["", "v1", "models", _, "activate"]:
            return Work("activate", 1, Priority.CATALOGUE)
        case (("DELETE" | "PATCH"), ["", "v1", "items", _]):
            return Work("item", 1, Priority.CATALOGUE)
    return Work("light", 1, Priority.LIGHT)


def _seed(kind: str) -> float:
    name, _, extent = kind.rpartition(" ")
    if extent in _FACTORS:
        return _SEEDS.get(name, _SEED) * _FACTORS[extent]
    return _SEEDS.get(kind, _SEED)


def _question(name: str, body: bytes) -> Work:
    """Kind and units of one question, whose costs differ by what it has explained."""
    # A hundred targets take about as long as all the rest of a score.
    targets = body.count(b",", body.find(b'"item_ids"')) if name == "score" else 0
    units = 1 + targets / 100
    if b'"explain_exact"' in body or b'"explain_effects"' in body:
        return Work(f"{name} {_EFFECTS}", units, Priority.QUESTION)
    if b'"explain"' in body:
        return Work(f"{name} {_EXPLAINED}", units, Priority.QUESTION)
    return Work(name, units, Priority.QUESTION)


def _write(kind: str, body: bytes, small: Priority, bulk: Priority) -> Work:
    rows = max(1, body.count(b'"item_id"'))
    if rows > MAX_SMALL_WRITE:
        return Work(f"bulk {kind}", rows / 100, bulk)
    return Work(kind, 1 + rows / 10, small)
