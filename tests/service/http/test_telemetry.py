"""Request ids, Server-Timing, metrics, health and errors without leaked details."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from service.domain.queries import Answer, AnswerItem, ScoreQuery
from service.domain.stage_clock import StageClock
from tests.support.http_fake import Client, serving


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
    """A valid X-Request-ID is echoed, an invalid one replaced."""
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


def test_a_score_that_is_no_number_is_an_error(client: Client) -> None:
    """An answer with NaN is a 500."""

    async def broken(query: ScoreQuery, stages: StageClock) -> Answer:
        return Answer([AnswerItem(item_id="a", score=float("nan"), title="")], "v1")

    client.engine.score = broken  # type: ignore[method-assign]
    assert client.post("/v1/score", json={"item_ids": ["a"]}).status_code == 500


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


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip", "gzip"), ("br;q=1, identity", None)])
def test_metrics_are_compressed_for_clients_that_accept_it(
    client: Client, accepted: str, encoding: str | None
) -> None:
    """The metrics are sent by gzip to a client that accepts gzip, and as they are to others."""
    answer = client.get("/metrics", headers={"accept-encoding": accepted})
    assert answer.headers.get("content-encoding") == encoding
    assert answer.headers["vary"] == "Accept-Encoding"
    assert "heed_http_in_flight 1.0" in answer.text.splitlines()
    compressed = int(answer.headers["content-length"]) < len(answer.content) / 2
    assert compressed == (encoding == "gzip")


def test_metrics_show_the_engines_numbers_of_now(client: Client) -> None:
    """The engine's statistics are gauges, read at each scrape."""
    items = 'heed_items{namespace="default"}'
    hits = 'heed_cache_hits_total{cache="history",namespace="default"}'
    assert samples(client)[items] == 0
    client.post("/v1/items", json={"items": [{"item_id": "a"}]})
    found = samples(client)
    assert (found[items], found[hits]) == (1, 3)


def test_two_apps_share_no_metrics(client: Client) -> None:
    """Each app has its own metrics."""
    client.get("/health/live")
    with serving() as other:
        assert not any('route="/health/live"' in name for name in samples(other))


def test_liveness_ignores_the_engine_and_readiness_reports_it(client: Client) -> None:
    """Liveness ignores the engine; readiness is 503 with its failed checks."""
    assert client.get("/health/live").json() == {"live": True}
    assert client.get("/health/ready").json()["ready"] is True
    client.engine.is_ready = False
    answer = client.get("/health/ready")
    assert (answer.status_code, answer.json()["checks"]["store"]) == (503, False)
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/health/live").status_code == 200


def test_the_landing_page_leads_to_the_docs(client: Client) -> None:
    """Every link of the landing page exists."""
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for link in re.findall(r'href="([^"]+)"', page.text):
        assert client.get(f"/{link}").status_code == 200
