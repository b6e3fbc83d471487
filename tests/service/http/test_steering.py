"""Any on the wire: the values that the engine is given, and where each error points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from models.catalogue.item_filter import Condition
from tests.support import asking
from tests.support.http_fake import Client, serving


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as served:
        yield served


WHEN = {"field": "attributes.a", "gte": 1}
RULE = {"name": "r", "when": WHEN, "boost": 1}


def test_every_field_reaches_the_engine(client: Client) -> None:
    """Rules, pins, quotas, the share to explore and the seed arrive as they are written."""
    body = {
        "rules": [RULE, {"name": "s", "when": {}, "bury": True}],
        "pin": [{"item_id": "x", "position": 2}],
        "at_most": [{"field": "tags", "count": 3}],
        "explore": 0.25,
        "seed": 7,
    }
    assert client.post("/v1/recommend", json=body).status_code == 200
    condition = Condition("attributes.a", {"gte": 1})
    question = client.engine.asked[-1]
    boosted, buried = question.rules
    assert (boosted.name, boosted.when, boosted.boost) == ("r", condition, 1.0)
    assert (buried.boost, buried.bury) == (None, True)
    assert question.pin == [asking.pin("x", 2)]
    assert question.at_most == [asking.quota("tags", 3)]
    assert (question.explore, question.seed) == (0.25, 7)
    assert client.post("/v1/recommend", json={}).status_code == 200
    question = client.engine.asked[-1]
    assert [question.rules, question.pin, question.at_most, question.explore] == [[], [], [], 0]
    assert client.post("/v1/score", json={"item_ids": ["x"], "rules": [RULE]}).status_code == 200
    assert [each.when for each in client.engine.asked[-1].rules] == [condition]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rules": [{"name": "r", "when": WHEN}]}, "/rules/0"),
    ({"rules": [RULE | {"bury": True}]}, "/rules/0/bury"),
    ({"rules": [RULE | {"boost": "1"}]}, "/rules/0/boost"),
    ({"rules": [RULE | {"boost": 1e9}]}, "/rules/0/boost"),
    ({"rules": [RULE | {"name": ""}]}, "/rules/0/name"),
    ({"rules": [{"name": "r", "boost": 1}]}, "/rules/0/when"),
    ({"rules": [RULE, RULE]}, "/rules/1/name"),
    ({"rules": [RULE | {"when": {"field": "colour", "eq": 1}}]}, "/rules/0/when/field"),
    ({"rules": [RULE | {"when": {"all": [{"field": "title", "eq": 1}]}}]},
     "/rules/0/when/all/0/eq"),
    ({"pin": [{"item_id": "x", "position": 0}]}, "/pin/0/position"),
    ({"pin": [{"item_id": "x", "position": 1}, {"item_id": "x", "position": 2}]},
     "/pin/1/item_id"),
    ({"pin": [{"item_id": "x", "position": 1}, {"item_id": "y", "position": 1}]},
     "/pin/1/position"),
    ({"at_most": [{"field": "item_id", "count": 1}]}, "/at_most/0/field"),
    ({"at_most": [{"field": "tags", "count": 0}]}, "/at_most/0/count"),
    ({"at_most": [{"field": "tags", "count": 1}, {"field": "tags", "count": 2}]},
     "/at_most/1/field"),
    ({"explore": 1.1}, "/explore"),
    ({"seed": -1}, "/seed"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "pointer"), WRONG)
def test_errors_point_at_what_is_wrong(client: Client, body: Any, pointer: str) -> None:
    """Each is refused with one error, which names the field."""
    answer = client.post("/v1/recommend", json=body)
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
