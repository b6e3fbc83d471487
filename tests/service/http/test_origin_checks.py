"""Host and Origin checks against DNS rebinding and cross-site writes."""

from __future__ import annotations

import pytest

from tests.support.http_fake import serving

ROUTES = [
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/health/live"),
    ("GET", "/metrics"),
    ("GET", "/v1/users"),
    ("GET", "/v1/nothing"),
    ("OPTIONS", "/v1/users/u"),
    ("DELETE", "/v1/users/u"),
    ("PUT", "/v1/users/u"),
    ("POST", "/v1/items"),
    ("POST", "/v1/models/train"),
]
WRITES = [(method, path) for method, path in ROUTES if method in ("DELETE", "PUT", "POST")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_foreign_host_is_refused_on_every_route(method: str, path: str) -> None:
    """A foreign host name (DNS rebinding) is 421 on every route, whatever the Origin."""
    headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    with serving() as client:
        client.engine.raises = AssertionError("the engine was called")
        answer = client.request(method, path, headers=headers, json={})
    assert answer.status_code == 421
    assert answer.headers["content-type"] == "application/problem+json"
    assert "HEED_ALLOWED_HOSTS" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("host", "settings", "allowed"),
    [
        ("localhost", {}, True),
        ("LOCALHOST:8000", {}, True),
        ("127.0.0.1:8000", {}, True),
        ("[::1]:8000", {}, True),
        ("", {}, False),
        ("localhost.evil.example", {}, False),
        ("localhost:8000.evil.example", {}, False),
        ("evil.example:localhost", {}, False),
        ("user@localhost", {}, False),
        ("192.0.2.7", {}, False),
        ("192.0.2.7:8000", {"host": "192.0.2.7"}, True),
        ("192.0.2.8", {"host": "192.0.2.7"}, False),
        ("[2001:db8::7]", {"host": "2001:db8::7"}, True),
        ("192.0.2.7:80", {"host": "0.0.0.0"}, True),
        ("[2001:db8::7]:80", {"host": "::"}, True),
        ("evil.example", {"host": "0.0.0.0"}, False),
        ("api:8000", {"allowed_hosts": "api, Heed.Example"}, True),
        ("heed.example", {"allowed_hosts": "api, Heed.Example"}, True),
        ("other.example", {"allowed_hosts": "api, Heed.Example"}, False),
        ("localhost", {"allowed_hosts": "api, Heed.Example"}, True),
        ("evil.example", {"allowed_hosts": "*"}, True),
    ],
)
def test_allowed_hosts(host: str, settings: dict[str, str], allowed: bool) -> None:
    """Loopback names, the bound address and the setting's names are allowed, whatever the port."""
    with serving(**settings) as client:
        status = client.get("/health/live", headers={"host": host}).status_code
    assert status == (200 if allowed else 421)


@pytest.mark.parametrize(("method", "path"), WRITES)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "origin": "http://localhost"},
    ],
)
def test_cross_site_writes_are_refused(method: str, path: str, headers: dict[str, str]) -> None:
    """A write from another origin is 403, even as JSON."""
    with serving() as client:
        client.engine.raises = AssertionError("the engine was called")
        answer = client.request(method, path, headers=headers, json={})
    assert answer.status_code == 403
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost"},
        {"origin": "https://LOCALHOST"},  # a proxy before the service speaks TLS
        {"sec-fetch-site": "same-origin", "origin": "http://localhost"},
        {"sec-fetch-site": "same-origin", "origin": "https://heed.example"},  # and rewrites Host
        {"sec-fetch-site": "none"},
    ],
)
def test_own_pages_and_programs_may_write(headers: dict[str, str]) -> None:
    """Clients without an Origin, and pages of the service itself, may write."""
    with serving() as client:
        assert client.put("/v1/users/u", headers=headers, json={}).is_success


def test_other_sites_may_link_to_the_page() -> None:
    """A cross-site navigation may open the page."""
    with serving() as client:
        assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
