"""Recommendations over HTTP with a filter, rules and quotas, beside the same without."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from service.domain.timestamps import to_rfc3339
from tests.benchmarks.harness.client import encode_post
from tests.benchmarks.harness.data import AT, LIMIT, generate
from tests.benchmarks.harness.options import Requests, Rounds
from tests.benchmarks.harness.servers import Cores, heed, pinned
from tests.benchmarks.harness.tables import print_machine
from tests.benchmarks.harness.turns import Subject, ask_in_turns, print_cases

_EVENTS = 100  # of the user who asks
_USERS = 50
FILTER: dict[str, Any] = {
    "all": [
        {"field": "attributes.price", "gte": 10},
        {"none": [{"field": "categories", "eq": "category 199"}]},
    ]
}
SHELVES = {"field": "categories", "in": ["category 3", "category 5"]}
BOOSTS: list[dict[str, Any]] = [
    {"name": "shelves", "when": SHELVES, "boost": 0.5},
    {"name": "dear", "when": {"field": "attributes.price", "gte": 50}, "boost": 0.2},
]
BURY: list[dict[str, Any]] = [
    {"name": "brand", "when": {"field": "attributes.brand", "eq": "brand 0"}, "bury": True}
]
QUOTA = [{"field": "categories", "count": 2}]
QUESTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a filter": {"filter": FILTER},
    "two boosts": {"rules": BOOSTS},
    "buried items": {"rules": BURY},
    "at most two of a category": {"at_most": QUOTA},
    "all of it": {"filter": FILTER, "rules": BOOSTS + BURY, "at_most": QUOTA},
}


def rules(
    items: Annotated[list[int] | None, typer.Option(min=1_000, help="Of the catalogue.")] = None,
    rounds: Rounds = 15,
    requests: Requests = 20,
) -> None:
    """Measure recommending with a filter, rules and a quota, beside the same without.

    By default among 4,000 items, which are compared one by one, and 60,000, which are indexed.
    """
    cores = Cores.choose()
    print_machine(cores)
    body = {"user_id": "user-0", "at": to_rfc3339(AT), "limit": LIMIT}
    for count in items or (4_000, 60_000):
        with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
            data = Path(folder) / "data"
            generate(data, items=count, lengths=[_EVENTS] * _USERS)
            with heed(data, core=cores.server) as server, pinned(cores.client):
                subjects = [
                    Subject(name, [server], {f"recommend {LIMIT}": [request]})
                    for name, more in QUESTIONS.items()
                    for request in [encode_post("/v1/recommend", body | more)]
                ]
                cases = ask_in_turns(subjects, connections=[1], rounds=rounds, requests=requests)
        print_cases(f"{count:,} items", cases)
