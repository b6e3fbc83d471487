"""Plain questions pass by FastAPI's routing, and are answered as it would answer them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from service.domain.errors import StoreUnreachable
from service.http.routes.context import PlainQuestions
from service.http.routes.questions import QUESTIONS
from tests.support.http_fake import Client, serving

BODIES = {
    "/v1/score": b'{"item_ids": ["a"], "user_id": "u"}',
    "/v1/recommend": b'{"user_id": "u", "limit": 2}',
    "/v1/search": b'{"query": "a"}',
    "/v1/attend": b'{"memory": {"keys": [[1]], "values": [[2]]}, "query": {"vector": [1]}}',
    "/v1/popular": b"{}",
    "/v1/rows": b'{"user_id": "u"}',
}
LARGE = b" " * 5_000  # bytes beyond which a body is validated on a thread
JSON = "application/json"


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[Client, Client]]:
    """The app as it is, and one that hands every request to FastAPI."""
    with serving(max_body_bytes=10_000) as plain, serving(max_body_bytes=10_000) as routed:
        *inner, last = routed.app.user_middleware
        assert cast(Any, last.cls) is PlainQuestions
        routed.app.user_middleware = inner
        yield plain, routed


def requests(path: str, valid: bytes) -> Iterator[tuple[str, str, bytes, str | None]]:
    """Yield method, URL, body and media type."""
    for kind in (JSON, "Application/JSON; charset=utf-8", "text/plain", None):
        yield "POST", path, valid, kind
        yield "POST", path, b"", kind
    for body in (b"null", b"[]", b"3", b"{", b'{"x": 1}', b'{"limit": "x"}', b'{"limit": NaN}'):
        yield "POST", path, body, JSON
        yield "POST", path, LARGE + body, JSON
    yield "POST", path, LARGE + valid, JSON
    yield "POST", path, LARGE + LARGE + valid, JSON
    yield "POST", f"{path}?limit=3&x=y", valid, JSON
    yield "POST", f"{path}/", valid, JSON
    for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE"):
        yield method, path, b"", JSON


def answered(client: Client, root: str, sent: Any) -> tuple[Any, ...]:
    """Return what a client and the engine see of a request."""
    method, url, body, kind = sent
    headers = {"x-request-id": "one"} | ({} if kind is None else {"content-type": kind})
    client.engine.about.clear()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(client.app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, root + url, content=body, headers=headers)

    answer = client.runner.run(ask())
    shown = dict(answer.headers)
    stages = re.findall(r"(\w+);dur", shown.pop("server-timing"))
    return answer.status_code, shown, answer.content, stages, [*client.engine.about]


def counted(client: Client) -> list[str]:
    """Return the counters of requests and of those that are timed, by method and route."""
    return sorted(
        re.findall(
            r".*(?:requests_total|request_duration_seconds_count){.*", client.get("/metrics").text
        )
    )


def test_every_question_is_listed() -> None:
    """A new question about no item or user has a body here."""
    assert {row.path for row in QUESTIONS if row.method == "POST" and not row.about} == {*BODIES}


@pytest.mark.parametrize("root", ["", "/heed"])
@pytest.mark.parametrize("path", BODIES)
def test_answers_are_those_of_the_routing(
    clients: tuple[Client, Client], path: str, root: str
) -> None:
    """Status, headers, body, stages and counters are the same for each way to send a question."""
    plain, routed = clients
    statuses = set()
    for sent in requests(path, BODIES[path]):
        found, expected = (answered(client, root, sent) for client in (plain, routed))
        assert found == expected, sent
        statuses.add(found[0])
    assert counted(plain) == counted(routed)
    assert statuses >= {200, 404, 405, 413, 415, 422}


@pytest.mark.parametrize("error", [StoreUnreachable("down"), ArithmeticError("NaN")])
def test_failures_are_those_of_the_routing(
    clients: tuple[Client, Client], error: Exception
) -> None:
    """An error of the engine is the same problem, and names nothing of an unexpected one."""
    sent = ("POST", "/v1/score", BODIES["/v1/score"], JSON)
    for client in clients:
        client.engine.raises = error
    try:
        found, expected = (answered(client, "", sent) for client in clients)
    finally:
        for client in clients:
            client.engine.raises = None
    assert found == expected
    assert found[0] >= 500
