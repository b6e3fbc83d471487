"""Batch requests: each response equals that of the same request sent alone."""

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
    {"path": "/v1/search", "body": {"query": 1}},
]


def alone(http: httpx.Client, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Send a request of a batch to its own route; return its status and body."""
    body = asked.get("body", {})
    if asked["path"].startswith("/v1/items/"):
        answer = http.get(asked["path"], params=body)
    else:
        answer = http.post(asked["path"], json=body)
    found: dict[str, Any] = answer.json()
    return answer.status_code, found


def test_batch_responses_equal_single_responses(http: httpx.Client) -> None:
    """Responses come in order and equal those of single requests, problems included."""
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
    """Percent-encoded ids in the path of a batched request are decoded as in a URL."""
    asked = {"path": "/v1/items/a%2Fb%20c/similar"}
    (response,) = http.post("/v1/batch", json={"requests": [asked]}).json()["responses"]
    assert response["status"] == 404
    assert "a/b c" in response["body"]["detail"]


@pytest.mark.parametrize(
    "path", ["/v1/events", "/v1/batch", "/v1/models/train", "score", "", "/v1/items//similar"]
)
def test_batch_accepts_only_read_requests(http: httpx.Client, path: str) -> None:
    """Writes, nested batches and malformed paths are 404, and the detail lists what is allowed."""
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
def test_malformed_batch_is_refused_with_a_pointer(
    http: httpx.Client, body: dict[str, Any], pointer: str
) -> None:
    answer = http.post("/v1/batch", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == pointer


def test_a_hundred_questions_are_answered(http: httpx.Client) -> None:
    """A batch of 100 requests, the maximum, succeeds."""
    asked = [{"path": "/v1/search", "body": {"query": f"rocket {n}", "limit": 1}}
             for n in range(100)]  # fmt: skip
    responses = http.post("/v1/batch", json={"requests": asked}).json()["responses"]
    assert [response["status"] for response in responses] == [200] * 100
