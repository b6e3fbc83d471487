"""Access control: every route, every scope, and keys that are wrong, revoked or expired."""

from __future__ import annotations

import random
import re
import string
import time
from dataclasses import replace

import httpx
import pytest
from starlette.routing import Route

from service.domain.errors import Unavailable
from service.domain.keys import SCOPES, Scope, issue_key
from service.domain.settings import Settings
from service.http.access import ROUTES, RouteTable
from service.http.app import create_app
from service.http.routes.questions import QUESTIONS as QUESTION_ROWS
from tests.support.http_fake import Client, serving

DOCUMENT = create_app(Settings()).openapi()
OPERATIONS = [
    (method.upper(), path)
    for path, operations in DOCUMENT["paths"].items()
    for method in operations
]
HEALTH = ("/health/live", "/health/ready")
GUARDED = [(method, path) for method, path in OPERATIONS if path not in HEALTH]
# What the scopes mean, said independently of the table: by the method and the path.
WATCHED = re.compile(r"/v1/(models|jobs)(/\{\w+\})?")
QUESTIONS = re.compile(
    r"/v1/(score|recommend|search|attend|popular|rows|batch|scenarios/\{name\}"
    r"|items/\{item_id\}/(similar|together))"
)


def expected(method: str, path: str) -> set[str]:
    """The scopes of which an operation needs one, by the rules that the documentation states."""
    if path == "/metrics":
        return {"metrics"}
    if method == "GET":
        return {"read", "train"} if WATCHED.fullmatch(path) else {"read"}
    if path.startswith(("/v1/models", "/v1/jobs")):
        return {"train"}
    return {"read"} if method == "POST" and QUESTIONS.fullmatch(path) else {"write"}


def bearer(token: str) -> dict[str, str]:
    """The headers of a request with a key."""
    return {"authorization": f"Bearer {token}"}


def send(client: Client, method: str, path: str, token: str | None = None) -> httpx.Response:
    """Send a request to a route, with some id in its path."""
    headers = {} if token is None else bearer(token)
    url = re.sub(r"\{\w+\}", "x", path)
    return client.request(method, url, headers=headers, json=None if method == "GET" else {})


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_each_operation_needs_a_key_with_its_scope(method: str, path: str) -> None:
    """Without a key 401; with each single scope 403, unless it is one of the operation's."""
    with serving() as client:
        keys = {scope: client.engine.issue(scope) for scope in SCOPES}
        anonymous = send(client, method, path)
        assert anonymous.status_code == 401
        assert anonymous.headers["www-authenticate"] == 'Bearer realm="heed"'
        assert anonymous.headers["content-type"] == "application/problem+json"
        for scope, token in keys.items():
            answer = send(client, method, path, token)
            if scope in expected(method, path) | {"admin"}:
                assert answer.status_code not in (401, 403)
            else:
                assert answer.status_code == 403
                assert "insufficient_scope" in answer.headers["www-authenticate"]
                assert "shop" in answer.json()["detail"]


def test_the_document_states_the_scopes_of_each_operation() -> None:
    """OpenAPI names the same alternatives as are enforced, and none on health."""
    for method, path in OPERATIONS:
        security = DOCUMENT["paths"][path][method.lower()]["security"]
        scopes = expected(method, path) if path not in HEALTH else set()
        assert security == [{}, *({"key": [scope]} for scope in sorted(scopes))]


def test_a_route_without_scopes_cannot_be_served() -> None:
    """A route that is missing from the table fails when the app is made; none is listed in vain."""

    async def added() -> None: ...

    with pytest.raises(LookupError, match="PUT /v1/added"):
        RouteTable([Route("/v1/added", added, methods=["PUT"])], ROUTES)
    questions = {(row.method, row.path) for row in QUESTION_ROWS}
    assert not questions & ROUTES.keys()
    listed = {
        pair
        for pair in {*ROUTES, *questions}
        if pair[1].startswith(("/v1/", "/health/", "/metrics"))
    }
    assert listed == set(OPERATIONS)


def test_without_any_key_nothing_changes() -> None:
    """While there was never a key, requests need none; `required` needs one, `off` never does."""
    with serving() as client:
        assert client.get("/v1/users").status_code == 200
        assert client.get("/health/ready").json()["checks"]
        client.engine.issue("read")
        assert client.get("/v1/users").status_code == 401
    with serving(keys="required") as client:
        assert client.get("/v1/users").status_code == 401
        assert client.get("/health/ready").json() == {"ready": True}
    with serving(keys="off") as client:
        client.engine.issue("read")
        assert client.get("/v1/users").status_code == 200
    with serving(host="0.0.0.0") as client:  # binds nothing
        assert client.get("/v1/users").status_code == 401


def test_the_last_key_that_is_revoked_does_not_open_the_service() -> None:
    """Where all keys are revoked or expired, requests still need one."""
    with serving() as client:
        token = client.engine.issue("admin")
        (key,) = client.engine.api_keys.values()
        assert client.get("/v1/users", headers=bearer(token)).status_code == 200
        client.engine.change(replace(key, revoked=1))
        refused = client.get("/v1/users", headers=bearer(token))
        assert (refused.status_code, "is revoked" in refused.json()["detail"]) == (401, True)
        assert client.get("/v1/users").status_code == 401


def test_a_key_expires() -> None:
    """A key is refused from its expiry on, although its record did not change."""
    with serving() as client:
        now = time.time_ns() // 1000
        late = client.engine.issue("read", expires=now + 3_600_000_000)
        assert client.get("/v1/users", headers=bearer(late)).status_code == 200
        (key,) = client.engine.api_keys.values()
        client.engine.change(replace(key, expires=now))
        refused = client.get("/v1/users", headers=bearer(late))
        assert (refused.status_code, "expired at 20" in refused.json()["detail"]) == (401, True)
        assert 'error="invalid_token"' in refused.headers["www-authenticate"]


def test_what_needs_no_key() -> None:
    """The page, its files and the documentation load without a key; health says yes or no."""
    with serving() as client:
        token = client.engine.issue("read")
        for path in ("/", "/playground/main.js", "/playground/settings.json", "/docs"):
            assert client.get(path).status_code == 200
        assert client.get("/openapi.json").status_code == 200
        assert client.get("/health/live").json() == {"live": True}
        assert client.get("/health/ready").json() == {"ready": True}
        assert client.get("/health/ready", headers=bearer("wrong")).json() == {"ready": True}
        assert client.get("/health/ready", headers=bearer(token)).json()["checks"]
        client.engine.is_ready = False
        unready = client.get("/health/ready")
        assert (unready.status_code, "checks" in unready.json()) == (503, False)
        assert "checks" in client.get("/health/ready", headers=bearer(token)).json()


def test_liveness_does_not_depend_on_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys cannot be read, the process is live, and requests for data are 503."""

    def broken() -> int:
        raise Unavailable("the store is closed")

    with serving() as client:
        monkeypatch.setattr(client.engine, "announced_keys", broken)
        assert client.get("/health/live").status_code == 200
        assert client.get("/v1/users").status_code == 503


def test_unknown_paths_are_refused_before_they_are_not_found() -> None:
    """Without a key any path is 401; with one it is 404, or 405 with the methods it takes."""
    with serving() as client:
        token = client.engine.issue("read")
        for method, path in (("GET", "/v1/nothing"), ("PUT", "/v1/score"), ("GET", "/metrics/")):
            assert client.request(method, path).status_code == 401
        assert client.get("/v1/nothing", headers=bearer(token)).status_code == 404
        answer = client.put("/v1/score", headers=bearer(token), json={})
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        for path in ("/v1/users/a%2Fb/history", "/v1/%75sers"):  # as the router understands them
            assert client.get(path).status_code == 401
            assert client.get(path, headers=bearer(token)).status_code in (200, 404)


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Basic {}")],
        [("authorization", "{}")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer {}"), ("authorization", "Bearer {}")],
        [("x-api-key", "{}")],
        [("cookie", "key={}")],
    ],
)
def test_a_key_is_taken_from_one_header_alone(headers: list[tuple[str, str]]) -> None:
    """Other schemes, other headers, two headers and query parameters authenticate nobody."""
    with serving() as client:
        token = client.engine.issue("admin")
        sent = [(name, value.format(token)) for name, value in headers]
        assert client.get("/v1/users", headers=sent).status_code == 401
        assert client.get("/v1/users", params={"key": token}).status_code == 401


def test_of_ten_thousand_wrong_keys_none_gets_in() -> None:
    """Random and tampered keys, unknown ids and crossed secrets are all refused."""
    rng = random.Random(11)
    alphabet = string.ascii_letters + string.digits + "-_"
    with serving() as client:
        good = [client.engine.issue("admin") for _ in range(4)]
        ids, secrets = [token[5:17] for token in good], [token[18:] for token in good]

        def wrong() -> str:
            token = rng.choice(good)
            match rng.randrange(5):
                case 0:
                    return issue_key("guess", frozenset({"admin"}), 0)[1]
                case 1:
                    place = rng.randrange(len(token))
                    other = rng.choice([c for c in alphabet if c != token[place]])
                    return token[:place] + other + token[place + 1 :]
                case 2:
                    return f"heed_{rng.choice(ids)}_{''.join(rng.choices(alphabet, k=43))}"
                case 3:
                    first, second = rng.sample(range(4), 2)
                    return f"heed_{ids[first]}_{secrets[second]}"
                case _:
                    return "".join(rng.choices(string.printable[:94], k=rng.randrange(90)))

        tokens = [wrong() for _ in range(10_000)]
        assert not set(tokens) & set(good)
        path = "/v1/nothing"  # 404 for whoever gets in, and the cheapest of all
        refused = [client.get(path, headers=bearer(token)).status_code for token in tokens]
        assert refused.count(401) == 10_000
        assert [client.get(path, headers=bearer(token)).status_code for token in good] == [404] * 4


def test_a_request_carries_its_key_and_namespace(caplog: pytest.LogCaptureFixture) -> None:
    """The access log names the key and its namespace, also of rewritten paths and of HEAD."""
    caplog.set_level("INFO", "heed.access")
    with serving() as client:
        client.get("/v1/users/a%2Fb/history")
        scopes: frozenset[Scope] = frozenset({"read"})
        key, token = issue_key("shop", scopes, 0, namespace="acme")
        client.engine.change(key)
        client.get("/v1/users/a%2Fb/history", headers=bearer(token))
        client.get("/v1/users/a/history", headers=bearer(token))
        client.request("HEAD", "/v1/users/a/history", headers=bearer(token))
    lines = [line.__dict__ for line in caplog.records if line.name == "heed.access"]
    seen = [(line["method"], line.get("key"), line["namespace"]) for line in lines]
    assert seen == [
        ("GET", None, "default"),
        ("GET", "shop", "acme"),
        ("GET", "shop", "acme"),
        ("HEAD", "shop", "acme"),
    ]
