"""Request ids, Server-Timing, metrics, health and errors without leaked details."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.domain.keys import Rate, Scope
from service.domain.settings import Settings
from service.http.app import create_app
from service.runtime import tracing
from service.runtime.tracing import StageClock
from tests.support.http_fake import Client, serving

pytestmark = pytest.mark.verify

OPERATIONS = [
    (method.upper(), path)
    for path, operations in create_app(Settings()).openapi()["paths"].items()
    for method in operations
]


@pytest.fixture
def client() -> Iterator[Client]:
    with serving(max_body_bytes=1000) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/docs", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/health/live", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/items", 200),
        ("GET", "/v1/items/nope", 404),
        ("GET", "/nope", 404),
        ("PUT", "/v1/items", 405),
        ("POST", "/v1/score", 415),
    ],
)
def test_every_answer_has_its_id_and_its_times(
    client: Client, method: str, path: str, status: int
) -> None:
    """Every response has an X-Request-ID and a Server-Timing header."""
    answer = client.request(method, path)
    assert answer.status_code == status
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
    assert re.fullmatch(
        r"([a-z]+;dur=\d+\.\d{3}, )*total;dur=\d+\.\d{3}", answer.headers["server-timing"]
    )


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("req-1.a:b/c+d=e@f", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("with space", False),
        ('"quoted"', False),
        ("<script>", False),
    ],
)
def test_valid_request_id_is_echoed(client: Client, sent: str, kept: bool) -> None:
    answer = client.get("/nope", headers={"x-request-id": sent})
    assert (answer.headers["x-request-id"] == sent) is kept
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_the_engines_stages_are_in_the_header(client: Client) -> None:
    """Server-Timing lists the engine's stages in order, with the total last."""
    answer = client.post("/v1/score", json={"item_ids": ["a"]})
    names = [part.partition(";")[0] for part in answer.headers["server-timing"].split(", ")]
    assert names == ["parse", "store", "attend", "render", "total"]


def test_a_stage_adds_up_and_ends_with_its_error() -> None:
    """A stage entered twice sums its times, and one that raises is timed too."""
    stages = StageClock()
    with stages("store"):
        pass
    once = stages.seconds["store"]
    with pytest.raises(KeyError), stages("store"), stages("coarse"):
        raise KeyError
    assert stages.seconds["store"] > once
    assert list(stages.seconds) == ["store", "coarse"]


def test_a_crash_is_a_problem_without_a_traceback(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error is a 500 without details, which are logged with the request id."""
    client.engine.raises = RuntimeError("secret-of-the-engine")
    with caplog.at_level(logging.ERROR):
        answer = client.post("/v1/score", json={"item_ids": ["a"]})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    (record,) = caplog.records
    assert answer.headers["x-request-id"] in record.getMessage()
    assert "secret-of-the-engine" in caplog.text
    assert "server-timing" in answer.headers


def samples(client: Client) -> dict[str, float]:
    text = client.get("/metrics").text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_metrics_count_by_route_and_never_by_id(client: Client) -> None:
    """Requests are counted by route template; unmatched paths share one label."""
    for n in range(3):
        client.get(f"/v1/items/secret%2F{n}")
        client.get(f"/nope/{n}")
    client.request("BREW", "/v1/items")
    client.post("/v1/score", json={"item_ids": ["a"]})
    found = samples(client)
    item = 'heed_http_requests_total{method="GET",route="/v1/items/{item_id}",status="404"}'
    assert found[item] == 3
    assert found['heed_http_requests_total{method="GET",route="unmatched",status="404"}'] == 3
    assert found['heed_http_request_duration_seconds_count{method="POST",route="/v1/score"}'] == 1
    assert found['heed_http_stage_duration_seconds_count{route="/v1/score",stage="attend"}'] == 1
    assert found["heed_http_in_flight"] == 1  # this one
    assert any('method="OTHER"' in name for name in found)
    assert not any("secret" in name or "nope" in name for name in found)


PUBLIC = ("/health/live", "/health/ready")  # they need no key


async def refused(client: Client, by: str, method: str, url: str) -> httpx.Response:
    """Send a request that one of the middlewares refuses."""
    engine, headers = client.engine, {}
    body: dict[str, Any] | None = None if method == "GET" else {}
    if by == "host":
        headers["host"] = "evil.example"
    elif by == "key":
        engine.issue("read")
    elif by == "scope":
        needless: Scope = "metrics" if url.startswith("/v1/") else "read"
        headers["authorization"] = f"Bearer {engine.issue(needless)}"
    elif by == "rate":
        token = engine.issue("admin", rate=Rate(1, 3600))
        headers["authorization"] = f"Bearer {token}"
        await client.http.get("/v1/nothing", headers=headers)
    elif by == "body":
        return await client.http.request(method, url, content=b" " * 1001)
    elif by == "admission":
        engine.gate = asyncio.Event()
        held = asyncio.create_task(client.http.post("/v1/score", json={"item_ids": ["a"]}))
        await engine.arrived.acquire()
        try:
            return await client.http.request(method, url, json=body)
        finally:
            engine.gate.set()
            await held
    return await client.http.request(method, url, headers=headers, json=body)


@pytest.mark.parametrize(
    ("by", "status"),
    [("host", 421), ("key", 401), ("scope", 403), ("rate", 429), ("body", 413), ("admission", 429)],
)
def test_what_is_refused_before_the_routing_has_its_route(
    by: str, status: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, the access log and traces of a refusal name the template of the refused route."""
    spans: list[Any] = []
    monkeypatch.setattr(tracing, "count_request", lambda _, attributes: spans.append(attributes))
    caplog.set_level(logging.DEBUG, "heed.access")
    free = {"host": (), "body": (), "admission": ("/metrics", *PUBLIC)}.get(by, PUBLIC)
    for method, template in OPERATIONS:
        if template in free:
            continue
        with serving(max_body_bytes=1000, max_in_flight=1, deadline=30) as client:
            url = re.sub(r"\{\w+\}", "private%2Fx", template)
            caplog.clear()
            spans.clear()
            answer = client.runner.run(refused(client, by, method, url))
            assert answer.status_code == status, (method, template)
            requests = client.app.state.metrics.requests(method, template, str(status))
            assert requests._value.get() == 1
            assert (method, template, status) in [
                (line.__dict__["method"], line.__dict__["route"], line.__dict__["status"])
                for line in caplog.records
                if line.name == "heed.access"
            ]
            assert (template, status) in [
                (span["http.route"], span["http.response.status_code"]) for span in spans
            ]


def test_what_is_refused_counts_for_its_namespace() -> None:
    """A refusal for load counts under the namespace that it is about, a missing key under none."""
    with serving(max_in_flight=1, deadline=30) as client:
        client.runner.run(refused(client, "admission", "POST", "/v1/recommend"))
        client.runner.run(refused(client, "key", "POST", "/v1/recommend"))
        counted = client.app.state.metrics.render({}, only="default").decode()
    found = re.findall(r'requests_total{.*route="(.*)",status="(\d+)"} 1\.0', counted)
    assert sorted(found) == [("/v1/recommend", "429"), ("/v1/score", "200")]
    assert 'duration_seconds_count{namespace="default"} 1.0' in counted  # the refusal has none


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip", "gzip"), ("br;q=1, identity", None)])
def test_metrics_are_compressed_for_clients_that_accept_it(
    client: Client, accepted: str, encoding: str | None
) -> None:
    answer = client.get("/metrics", headers={"accept-encoding": accepted})
    assert answer.headers.get("content-encoding") == encoding
    assert answer.headers["vary"] == "Accept-Encoding"
    assert "heed_http_in_flight 1.0" in answer.text.splitlines()
    compressed = int(answer.headers["content-length"]) < len(answer.content) / 2
    assert compressed == (encoding == "gzip")


def test_the_landing_page_leads_to_the_docs(client: Client) -> None:
    """Every link of the landing page exists."""
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for link in re.findall(r'href="([^"]+)"', page.text):
        assert client.get(f"/{link}").status_code == 200
