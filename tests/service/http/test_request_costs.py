"""Costs of requests: what is counted of a body, what is urgent, and what measurements change."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from service.http.admission.request_costs import Priority, RequestCosts, Work, classify
from service.http.limits import BODY


def scope(method: str, path: str, body: Any = None) -> dict[str, Any]:
    held = b"" if body is None else orjson.dumps(body)
    return {"method": method, "path": path, "root_path": "", BODY: held}


def rows(count: int) -> list[dict[str, str]]:
    return [{"item_id": f"i{number}"} for number in range(count)]


@pytest.mark.parametrize(
    ("method", "path", "body", "priority"),
    [
        ("POST", "/v1/score", {"item_ids": ["a"]}, Priority.QUESTION),
        ("POST", "/v1/recommend", {}, Priority.QUESTION),
        ("POST", "/v1/batch", {"requests": []}, Priority.QUESTION),
        ("POST", "/v1/scenarios/home", {}, Priority.QUESTION),
        ("GET", "/v1/items/a/similar", None, Priority.QUESTION),
        ("GET", "/v1/users/u/affinities", None, Priority.QUESTION),
        ("POST", "/v1/events", {"events": rows(1)}, Priority.LIGHT),
        ("POST", "/v1/events", {"events": rows(51)}, Priority.BULK),
        ("POST", "/v1/items", {"items": rows(50)}, Priority.CATALOGUE),
        ("POST", "/v1/items", {"items": rows(51)}, Priority.IMPORT),
        ("GET", "/v1/items/a", None, Priority.LIGHT),
        ("PATCH", "/v1/items/a", {}, Priority.CATALOGUE),
        ("POST", "/v1/models/v1/activate", {}, Priority.CATALOGUE),
        ("PUT", "/v1/scenarios/home", {}, Priority.LIGHT),
        ("GET", "/nothing/here", None, Priority.LIGHT),
    ],
)
def test_questions_and_single_events_come_before_imports(
    method: str, path: str, body: Any, priority: Priority
) -> None:
    """The priority of a request is that of its route and of the number of rows in its body."""
    assert classify(scope(method, path, body)).priority is priority


def test_a_request_costs_by_its_size() -> None:
    """More targets, more questions of a batch and explanations cost more."""
    costs = RequestCosts()

    def cost(path: str, body: Any) -> float:
        return costs.expected(classify(scope("POST", path, body)))

    few = cost("/v1/score", {"user_id": "u", "item_ids": ["a"]})
    many = cost("/v1/score", {"user_id": "u", "item_ids": [f"i{n}" for n in range(1_000)]})
    assert 8 * few < many < 15 * few
    one, hundred = ({"requests": [{"path": "/v1/search"}] * n} for n in (1, 100))
    assert cost("/v1/batch", hundred) == pytest.approx(100 * cost("/v1/batch", one))
    plain, explained = cost("/v1/recommend", {}), cost("/v1/recommend", {"explain": 3})
    assert plain < explained < cost("/v1/recommend", {"explain": 3, "explain_effects": True})


def test_costs_follow_what_is_measured() -> None:
    """The mean of a kind approaches its measurements; other kinds keep theirs."""
    costs = RequestCosts()
    score, search = (Work(kind, 2, Priority.QUESTION) for kind in ("score", "search"))
    before = costs.expected(search)
    for _ in range(100):
        costs.observe(score, 0.5)
    assert costs.expected(score) == pytest.approx(0.5, rel=0.01)
    assert costs.expected(search) == before


def test_one_stall_does_not_decide_what_a_kind_costs() -> None:
    """A single extreme measurement changes the mean by a factor of two at most."""
    costs = RequestCosts()
    work = Work("score", 1, Priority.QUESTION)
    before = costs.expected(work)
    costs.observe(work, 1e6)
    assert before < costs.expected(work) <= 2 * before
