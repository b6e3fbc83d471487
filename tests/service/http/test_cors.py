"""CORS: which pages of other origins may send requests from a browser."""

from __future__ import annotations

import pytest

from service.domain.errors import Invalid
from service.domain.settings import Settings
from tests.support.http_fake import serving

SHOP, OTHER = "https://shop.example", "https://other.example"
PREFLIGHT = {
    "access-control-request-method": "PUT",
    "access-control-request-headers": "authorization, content-type",
}


def test_no_origin_is_allowed_by_default() -> None:
    """Without the setting no answer has a CORS header, and a preflight fails."""
    with serving() as client:
        answer = client.get("/v1/users", headers={"origin": SHOP})
        preflight = client.request("OPTIONS", "/v1/users/u", headers={"origin": SHOP, **PREFLIGHT})
    assert preflight.status_code == 405
    for one in (answer, preflight):
        assert not [name for name in one.headers if name.startswith("access-control")]


def test_an_allowed_origin_may_write_and_read_errors() -> None:
    """A listed origin passes preflight without a key, and may write and read with one."""
    with serving(cors_origins=f"{SHOP}, http://localhost:5173") as client:
        token = client.engine.issue("write")
        origin = {"origin": SHOP}
        preflight = client.request("OPTIONS", "/v1/users/u", headers={**origin, **PREFLIGHT})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == SHOP
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        headers = {**origin, "sec-fetch-site": "cross-site"}
        refused = client.put("/v1/users/u", headers=headers, json={})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == SHOP
        headers["authorization"] = f"Bearer {token}"
        answer = client.put("/v1/users/u", headers=headers, json={})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == SHOP
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


def test_other_origins_stay_out() -> None:
    """An origin that is not listed gets no CORS header, and its writes are refused."""
    with serving(cors_origins=SHOP) as client:
        for origin in (OTHER, f"{SHOP}.evil.example", "http://shop.example", "null"):
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            preflight = client.request("OPTIONS", "/v1/users/u", headers={**headers, **PREFLIGHT})
            assert preflight.status_code == 400
            answer = client.put("/v1/users/u", headers=headers, json={})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["*", "shop.example", "https://shop.example/", "https://*.a.b"])
def test_what_is_no_origin_is_refused(monkeypatch: pytest.MonkeyPatch, origin: str) -> None:
    """A wildcard, a bare host or a path is refused with the variable's name."""
    monkeypatch.setenv("HEED_CORS_ORIGINS", f"{SHOP},{origin}")
    with pytest.raises(Invalid, match=r"HEED_CORS_ORIGINS.*such as https://shop\.example"):
        Settings.read()
