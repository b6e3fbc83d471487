"""Many questions in one request: each as if it had come alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.tiny import AT, item_id

QUESTIONS: list[dict[str, Any]] = [
    {"path": "/v1/score", "body": {"user_id": "u3", "item_ids": [item_id(0, 1)], "at": AT}},
    {"path": "/v1/recommend", "body": {"user_id": "u3", "limit": 3, "at": AT, "explain": 2}},
    {"path": "/v1/search", "body": {"query": "rocket", "limit": 3}},
    {"path": f"/v1/items/{item_id(1, 2)}/similar", "body": {"limit": 2, "space": "content"}},
    {
        "path": "/v1/attend",
        "body": {
            "memory": {"keys": [[1.0, 0.0], [0.0, 1.0]], "values": [[1.0], [2.0]]},
            "query": {"vector": [1.0, 0.0]},
        },
    },
    {"path": f"/v1/items/{item_id(2, 3)}"},
    {"path": "/v1/items/nobody"},
    {"path": "/v1/score", "body": {"item_ids": ["nobody"]}},
    {"path": "/v1/score", "body": {"item_ids": [item_id(0, 1)], "temperature": 0}},
    {"path": "/v1/recommend", "body": {"limit": "many", "color": "blue"}},
    {"path": "/v1/items/nobody/similar"},
    {"path": "/v1/search", "body": {}},
]


def alone(http: httpx.Client, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The same question on its own route."""
    body = asked.get("body", {})
    if asked["path"].startswith("/v1/items/"):
        answer = http.get(asked["path"], params=body)
    else:
        answer = http.post(asked["path"], json=body)
    found: dict[str, Any] = answer.json()
    return answer.status_code, found


def test_each_is_answered_as_if_it_had_come_alone(http: httpx.Client) -> None:
    """In order, with the same answers, and the same problems where there are some."""
    answer = http.post("/v1/batch", json={"requests": QUESTIONS})
    assert answer.status_code == 200
    responses = answer.json()["responses"]
    assert len(responses) == len(QUESTIONS)
    statuses = []
    for asked, response in zip(QUESTIONS, responses, strict=True):
        status, expected = alone(http, asked)
        statuses.append(status)
        assert response["status"] == status
        for body in (response["body"], expected):
            body.pop("request_id", None)
        assert response["body"] == expected
    assert statuses == [200] * 6 + [404, 404, 422, 422, 404, 422]


def test_ids_are_escaped_as_in_a_path(http: httpx.Client) -> None:
    """So that an id with a slash is asked for as it is alone."""
    asked = {"path": "/v1/items/a%2Fb%20c/similar"}
    (response,) = http.post("/v1/batch", json={"requests": [asked]}).json()["responses"]
    assert response["status"] == 404
    assert "a/b c" in response["body"]["detail"]


@pytest.mark.parametrize(
    "path", ["/v1/events", "/v1/batch", "/v1/models/train", "score", "", "/v1/items//similar"]
)
def test_batch_accepts_only_questions(http: httpx.Client, path: str) -> None:
    """A batch writes nothing, and holds no other batch; what is allowed is said."""
    (response,) = http.post("/v1/batch", json={"requests": [{"path": path}]}).json()["responses"]
    assert response["status"] == 404
    assert "/v1/search" in response["body"]["detail"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"requests": []}, "/requests"),
        ({"requests": [{"path": "/v1/search"}] * 101}, "/requests"),
        ({"requests": [{"body": {}}]}, "/requests/0/path"),
        ({"requests": [{"path": "/v1/search", "body": []}]}, "/requests/0/body"),
        ({}, "/requests"),
    ],
)
def test_what_is_no_batch_is_refused(
    http: httpx.Client, body: dict[str, Any], pointer: str
) -> None:
    """And its field is named."""
    answer = http.post("/v1/batch", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == pointer


def test_a_hundred_questions_are_answered(http: httpx.Client) -> None:
    """As many as are allowed."""
    asked = [{"path": "/v1/search", "body": {"query": f"rocket {n}", "limit": 1}}
             for n in range(100)]  # fmt: skip
    responses = http.post("/v1/batch", json={"requests": asked}).json()["responses"]
    assert [response["status"] for response in responses] == [200] * 100
