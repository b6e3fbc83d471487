"""Limits on bodies, requests and time: the refusal of each, and recovery afterwards."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.domain.errors import QuotaExceeded
from service.domain.records import parse_json
from service.http.limits import address_of
from service.http.routes import context
from tests.support.http_fake import Client, serving

pytestmark = pytest.mark.verify

SCORE = {"item_ids": ["a"]}
JSON = {"host": "localhost", "content-type": "application/json"}


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def test_a_quota_is_507_and_names_no_time() -> None:
    """What exceeds a quota is 507 without Retry-After, since waiting does not help."""
    with serving() as client:
        client.engine.raises = QuotaExceeded("the store may hold 10 events (HEED_MAX_EVENTS)")
        event = {"user_id": "u", "item_id": "i"}
        answer = client.post("/v1/events", json={"events": [event]})
    assert answer.status_code == 507
    assert answer.json()["title"] == "Quota Exceeded"
    assert "HEED_MAX_EVENTS" in answer.json()["detail"]
    assert "retry-after" not in answer.headers


def test_a_body_too_long_is_refused_by_its_length_alone() -> None:
    """A Content-Length above the limit is 413 before any byte of the body is read."""
    with serving(max_body_bytes=100) as client:
        sent = client.runner.run(call(client, {**JSON, "content-length": "101"}, []))
    assert sent[0]["status"] == 413
    assert (b"connection", b"close") in sent[0]["headers"]


def compressed(client: Client, body: bytes, encoding: str = "gzip", path: str = "/v1/score") -> Any:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    if path == "/v1/items":
        headers["content-type"] = "application/x-ndjson"
    return client.request("POST", path, content=body, headers=headers)


def test_a_gzip_body_is_read_within_the_limit_of_its_bytes() -> None:
    """What is inflated is bounded as any body; other encodings are 415, and broken bytes 400."""
    plain = b'{"item_ids": ["a"]}'
    with serving(max_body_bytes=1000) as client:
        assert compressed(client, gzip.compress(plain)).status_code == 200
        # A file may have several members.
        members = gzip.compress(plain[:5]) + gzip.compress(plain[5:])
        assert compressed(client, members).status_code == 200
        assert compressed(client, plain, "identity").status_code == 200
        full = plain.ljust(1000)
        assert compressed(client, gzip.compress(full)).status_code == 200
        for large in (full + b" ", b" " * 200_000):
            assert compressed(client, gzip.compress(large)).status_code == 413
        for broken in (plain, gzip.compress(plain)[:-1], gzip.compress(plain) + b"x"):
            assert compressed(client, broken).status_code == 400
        refused = compressed(client, plain, "br")
        assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip")
        assert refused.json()["detail"] == "Content-Encoding may be gzip, not br."
        lines = b'{"item_id": "a"}\n{"item_id": 7}\n{"item_id": "b"}\n'
        stored = compressed(client, gzip.compress(lines), path="/v1/items").json()
        assert (stored["stored"], [each["line"] for each in stored["errors"]]) == (2, [2])
        refused = compressed(client, gzip.compress(lines + b"\n" * 1000), path="/v1/items")
        assert refused.status_code == 413
        assert "Without Content-Encoding, a stream has no such limit" in refused.json()["detail"]
        assert compressed(client, lines, path="/v1/items").status_code == 400
        assert client.app.state.arrivals.buffered.taken == 0


async def call(client: Client, headers: dict[str, str], messages: list[Any]) -> list[Any]:
    """Post to /v1/score with these body messages; more is asked for once the answer is out."""
    sent: list[Any] = []

    async def receive() -> Any:
        if not messages:
            assert sent, "the app asked for more of the body before it answered"
            return {"type": "http.disconnect"}
        message = messages.pop(0)
        return await message if asyncio.iscoroutine(message) else message

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/score",
        "root_path": "",
        "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    await client.app(scope, receive, send)
    return sent


def test_a_chunked_body_is_counted_as_it_comes() -> None:
    """A chunked body above the limit is 413, and reading stops there."""
    part = {"type": "http.request", "body": b" " * 60, "more_body": True}
    with serving(max_body_bytes=100) as client:
        sent = client.runner.run(call(client, JSON, [part, part]))
        exact = client.post(
            "/v1/score", content=chunks(b" " * 78, b'{"item_ids": ["a"]}'[:-1], b"}")
        )
    assert sent[0]["status"] == 413
    assert exact.status_code == 415  # of a hundred bytes: not too large


def test_all_bodies_together_are_bounded() -> None:
    """The bytes of all unfinished bodies are bounded (429) and released with each request."""
    with serving(max_buffered_bytes=150) as client:

        async def crowd() -> tuple[list[Any], list[Any]]:
            waiting, finish = asyncio.Event(), asyncio.Event()

            async def end() -> Any:
                waiting.set()
                await finish.wait()
                return {"type": "http.request", "body": b"}"}

            start = {"type": "http.request", "body": b'{"item_ids": []' + b" " * 85}
            first = asyncio.create_task(call(client, JSON, [{**start, "more_body": True}, end()]))
            await waiting.wait()
            second = await call(client, JSON, [{**start, "more_body": True}])
            finish.set()
            return await first, second

        first, second = client.runner.run(crowd())
        third = client.post("/v1/score", content=b" " * 100 + b'{"item_ids": []}', headers=JSON)
    assert (first[0]["status"], second[0]["status"], third.status_code) == (200, 429, 200)


def test_a_key_buffers_a_quarter_of_all_bodies() -> None:
    """Beyond its quarter a key's body is 429 and names the bound; another key's is read."""
    with serving(max_buffered_bytes=400, max_body_bytes=100) as client:
        many, few = (
            {**JSON, "authorization": f"Bearer {client.engine.issue('read')}"} for _ in range(2)
        )

        async def crowd() -> list[list[Any]]:
            waiting, finish = asyncio.Event(), asyncio.Event()

            async def end() -> Any:
                waiting.set()
                await finish.wait()
                return {"type": "http.request", "body": b"}"}

            start = {"type": "http.request", "body": b'{"item_ids": []' + b" " * 55}
            held = asyncio.create_task(call(client, many, [{**start, "more_body": True}, end()]))
            await waiting.wait()
            refused = await call(client, many, [{**start, "more_body": True}])
            whole = {"type": "http.request", "body": b'{"item_ids": []}'}
            answered = await call(client, few, [whole])
            finish.set()
            return [await held, refused, answered]

        held, refused, answered = client.runner.run(crowd())
    assert [each[0]["status"] for each in (held, refused, answered)] == [200, 429, 200]
    assert b"The API key shop (" in refused[1]["body"]
    assert b"100 of 400 (HEED_MAX_BUFFERED_BYTES)" in refused[1]["body"]


def test_clients_are_told_apart_by_address_or_network() -> None:
    """An IPv4 address is one client, also as IPv6; of IPv6 a network of 64 bits is one."""
    named = [address_of((host, 1)) for host in ("192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2")]
    assert named == ["The address 192.0.2.1", "The address 192.0.2.1", "The address 192.0.2.2"]
    one, same, other = (address_of((f"2001:db8:0:{n}", 1)) for n in ("1::1", "1:2::3", "2::1"))
    assert one == same != other


def test_stalled_body_times_out() -> None:
    """A stalled body is 408 and takes no place among the requests in flight."""
    with serving(body_timeout=0.05, max_in_flight=1) as client:

        async def slow() -> tuple[list[Any], httpx.Response]:
            asked = asyncio.Event()

            async def never() -> Any:
                asked.set()
                await asyncio.Event().wait()

            begun = {"type": "http.request", "body": b"{", "more_body": True}
            sender = asyncio.create_task(call(client, JSON, [begun, never()]))
            await asked.wait()
            other = await client.http.post("/v1/score", json=SCORE)
            return await sender, other

        sent, other = client.runner.run(slow())
    assert sent[0]["status"] == 408
    assert other.status_code == 200


def test_too_many_requests_are_refused_at_once() -> None:
    """A request beyond the limit in flight is 429, and the others finish."""
    with serving(max_in_flight=2, deadline=30) as client:
        client.engine.gate = asyncio.Event()

        async def crowd() -> tuple[list[httpx.Response], httpx.Response, httpx.Response]:
            assert client.engine.gate is not None
            admitted = [
                asyncio.create_task(client.http.post("/v1/score", json=SCORE)) for _ in range(2)
            ]
            await client.engine.arrived.acquire()
            await client.engine.arrived.acquire()
            refused = await client.http.post("/v1/score", json=SCORE)
            health = await client.http.get("/health/live")
            client.engine.gate.set()
            return await asyncio.gather(*admitted), refused, health

        admitted, refused, health = client.runner.run(crowd())
        after = client.post("/v1/score", json=SCORE)
    assert [answer.status_code for answer in admitted] == [200, 200]
    assert (refused.status_code, refused.json()["title"]) == (429, "Overloaded")
    assert refused.headers["retry-after"] == "1"
    assert (health.status_code, after.status_code) == (200, 200)
    assert len(client.engine.asked) == 3  # the refused one never reached the engine


def test_writes_do_not_wait_for_questions() -> None:
    """While more questions compute than there are places, a write of one row is answered."""
    with serving(deadline=30) as client:
        client.engine.gate = asyncio.Event()

        async def crowd() -> tuple[list[httpx.Response], httpx.Response]:
            assert client.engine.gate is not None
            asked = [
                asyncio.create_task(client.http.post("/v1/score", json=SCORE)) for _ in range(20)
            ]
            await client.engine.arrived.acquire()
            written = await client.http.delete("/v1/users/u")
            client.engine.gate.set()
            return await asyncio.gather(*asked), written

        answers, written = client.runner.run(crowd())
    assert {answer.status_code for answer in (*answers, written)} == {200}


def test_long_bodies_are_validated_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long bodies never hold Python's lock in turns, which keeps it from the event loop."""
    at_once, most = 0, 0

    def parse(data: bytes) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.02)
        at_once -= 1
        return parse_json(data)

    monkeypatch.setattr(context, "parse_json", parse)
    body = {"item_ids": [f"item-{number}" for number in range(1_000)]}
    with serving(deadline=30) as client:

        async def crowd() -> list[httpx.Response]:
            return await asyncio.gather(*(client.http.post("/v1/score", json=body) for _ in "1234"))

        answers = client.runner.run(crowd())
    assert [answer.status_code for answer in answers] == [200] * 4
    assert most == 1


def test_the_deadline_ends_a_request() -> None:
    """A request beyond the deadline is 503 with Retry-After, and its place is released."""
    with serving(deadline=0.05, max_in_flight=1) as client:
        client.engine.gate = asyncio.Event()
        late = client.post("/v1/score", json=SCORE)
        client.engine.gate = None
        after = client.post("/v1/score", json=SCORE)
    assert (late.status_code, late.json()["title"]) == (503, "Deadline Exceeded")
    assert late.headers["retry-after"] == "1"
    assert late.headers["x-request-id"] == late.json()["request_id"]
    assert after.status_code == 200


def test_an_activation_has_no_deadline() -> None:
    """An activation continues beyond the deadline and succeeds."""
    with serving(deadline=0.01) as client:
        client.engine.gate = asyncio.Event()

        async def both() -> tuple[httpx.Response, httpx.Response]:
            assert client.engine.gate is not None
            begun = asyncio.create_task(client.http.post("/v1/models/v1/activate", json={}))
            await client.engine.arrived.acquire()
            late = await client.http.post("/v1/score", json=SCORE)
            client.engine.gate.set()
            return await begun, late

        activated, late = client.runner.run(both())
    assert (late.status_code, late.json()["title"]) == (503, "Deadline Exceeded")
    assert (activated.status_code, activated.json()["model_version"]) == (200, "v1")


def test_an_activation_takes_a_place() -> None:
    """An activation counts among the requests in flight."""
    with serving(max_in_flight=1) as client:
        client.engine.gate = asyncio.Event()

        async def crowd() -> tuple[httpx.Response, httpx.Response]:
            assert client.engine.gate is not None
            begun = asyncio.create_task(client.http.post("/v1/models/v1/activate", json={}))
            await client.engine.arrived.acquire()
            refused = await client.http.post("/v1/score", json=SCORE)
            client.engine.gate.set()
            return await begun, refused

        activated, refused = client.runner.run(crowd())
        after = client.post("/v1/score", json=SCORE)
    assert (activated.status_code, refused.status_code, after.status_code) == (200, 429, 200)


def test_a_timeout_of_the_engine_is_not_the_deadline() -> None:
    """A TimeoutError raised by the engine is a 500, not a 503."""
    with serving() as client:
        client.engine.raises = TimeoutError("a socket's")
        answer = client.post("/v1/score", json=SCORE)
    assert answer.status_code == 500
