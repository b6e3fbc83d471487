"""NDJSON streams of items: bounded memory, errors per line, and no partial line."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.domain.errors import StoreFull
from service.http.routes.record_bodies import convert_rows
from service.http.routes.records import split_lines
from tests.support.http_fake import Client, serving

NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture
def client() -> Iterator[Client]:
    with serving(
        max_ndjson_line_bytes=200, max_body_bytes=100, deadline=0.05, max_streams=1
    ) as client:
        yield client


def post(client: Client, lines: bytes) -> httpx.Response:
    return client.post("/v1/items", content=lines, headers=NDJSON)


def test_a_stream_may_be_larger_than_any_body(client: Client) -> None:
    """A stream may exceed the body limit and the deadline, and is stored in batches."""

    async def lines() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.1)  # longer than a request may take
        for n in range(3_000):
            yield b'{"item_id": "i%d"}\n' % n

    answer = client.post("/v1/items", content=lines(), headers=NDJSON)
    assert answer.json() == {"stored": 3_000, "failed": 0, "errors": []}
    assert len(client.engine.items) == 3_000
    assert max(client.engine.batches) <= 500


def test_each_bad_line_is_named_and_the_others_stored(client: Client) -> None:
    """Errors carry the line's number and reason; blank lines and CRLF are no errors."""
    lines = [
        b'{"item_id": "a"}\r',
        b"",
        b'{"item_id": 1}',
        b"not json",
        b'{"item_id": "b", "colour": 1}',
        b'{"item_id": "c", "embedding": [1]}',
        b'{"item_id": "\\ud800"}',
        b'{"item_id": "d", "title": "refused by the engine"}',
        b'{"item_id": "e", "title": "%s"}' % (b"x" * 300),
        b"[]",
        b'{"item_id": "f"}',  # no newline at its end
    ]
    report = post(client, b"\n".join(lines)).json()
    assert (report["stored"], report["failed"]) == (2, 8)
    reasons = {error["line"]: error["detail"] for error in report["errors"]}
    assert sorted(reasons) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert "/item_id" in reasons[3]
    assert "not JSON" in reasons[4]
    assert "/colour" in reasons[5]
    assert "1 dimensions" in reasons[6]
    assert "does not want" in reasons[8]
    assert "200 bytes" in reasons[9]
    assert sorted(client.engine.items) == ["a", "f"]


def test_the_report_stays_small(client: Client) -> None:
    """All errors are counted, and the first 100 are listed."""
    report = post(client, b"x\n" * 1000).json()
    assert (report["failed"], len(report["errors"])) == (1000, 100)


def test_an_empty_stream_is_no_error(client: Client) -> None:
    assert post(client, b"").json() == {"stored": 0, "failed": 0, "errors": []}


def test_a_full_store_ends_the_stream_and_says_how_far_it_came(client: Client) -> None:
    """A full store ends the stream with 507 and the number of items stored before."""
    put_items = client.engine.put_items

    async def fill(items: Any) -> int:
        if client.engine.batches:
            raise StoreFull("no room")
        return await put_items(items)

    client.engine.put_items = fill  # type: ignore[method-assign]
    answer = post(client, b"".join(b'{"item_id": "i%d"}\n' % n for n in range(700)))
    assert (answer.status_code, answer.json()["stored"]) == (507, 500)


def test_a_cut_stream_stores_no_half_line(client: Client) -> None:
    """When the client disconnects, a last line without its end is not stored."""
    messages = [
        {"type": "http.request", "body": b'{"item_id": "a"}\n{"item_id": "b"}', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/items",
        "raw_path": b"/v1/items",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/x-ndjson")],
    }
    client.runner.run(client.app(scope, receive, send))
    assert "b" not in client.engine.items
    assert sent == []


def test_streams_have_their_own_limit(client: Client) -> None:
    """A stream beyond `max_streams` is 429 while other requests are served."""

    async def both() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        started, finish = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            started.set()
            await finish.wait()
            yield b'{"item_id": "a"}'

        first = asyncio.create_task(client.http.post("/v1/items", content=slow(), headers=NDJSON))
        await started.wait()
        second = await client.http.post("/v1/items", content=b"", headers=NDJSON)
        other = await client.http.get("/v1/items")
        finish.set()
        return await first, second, other

    first, second, other = client.runner.run(both())
    assert (first.status_code, second.status_code, other.status_code) == (200, 429, 200)
    assert second.headers["retry-after"] == "1"
    assert post(client, b"").status_code == 200


def test_a_key_has_half_of_the_streams() -> None:
    """A key's third stream of four is 429 and names the bound, while another key's is stored."""
    with serving(max_streams=4) as client:
        many, few = (
            {**NDJSON, "authorization": f"Bearer {client.engine.issue('write')}"} for _ in range(2)
        )

        async def talk() -> tuple[httpx.Response, httpx.Response, list[httpx.Response]]:
            begun, finish = asyncio.Semaphore(0), asyncio.Event()

            async def slow() -> AsyncIterator[bytes]:
                begun.release()
                await finish.wait()
                yield b'{"item_id": "a"}'

            def send(headers: dict[str, str], content: Any) -> asyncio.Task[httpx.Response]:
                post = client.http.post("/v1/items", content=content, headers=headers)
                return asyncio.create_task(post)

            held = [send(many, slow()) for _ in range(2)]
            for _ in held:
                await begun.acquire()
            third, other = await send(many, b""), await send(few, b'{"item_id": "b"}')
            finish.set()
            return third, other, list(await asyncio.gather(*held))

        third, other, held = client.runner.run(talk())
        assert (third.status_code, third.headers["retry-after"]) == (429, "1")
        assert "The API key shop (" in third.json()["detail"]
        assert "2 of 4 (HEED_MAX_STREAMS)" in third.json()["detail"]
        assert other.json()["stored"] == 1
        assert [each.status_code for each in held] == [200, 200]
        assert client.post("/v1/items", content=b"", headers=many).status_code == 200


def test_a_stream_that_drips_loses_its_place() -> None:
    """A stream of a byte again and again is 408, and its complete lines are stored."""

    async def drip() -> AsyncIterator[bytes]:
        yield b'{"item_id": "a"}\n{"item_id": "b'
        for _ in range(500):  # ten seconds, at which a service without the bound answers
            await asyncio.sleep(0.02)
            yield b"b"

    with serving(body_timeout=0.2, max_streams=1) as client:
        answer = client.post("/v1/items", content=drip(), headers=NDJSON)
        assert (answer.status_code, answer.json()["stored"]) == (408, 1)
        assert answer.headers["connection"] == "close"
        assert "at least 1024 a second" in answer.json()["detail"]
        assert list(client.engine.items) == ["a"]
        assert post(client, b"").status_code == 200


def test_a_stream_that_stalls_is_told_what_was_stored() -> None:
    """A stream without a next chunk is 408, and its complete lines are stored."""

    async def stall() -> AsyncIterator[bytes]:
        yield b'{"item_id": "a"}\n{"item_id": "b'
        await asyncio.Event().wait()

    with serving(body_timeout=0.1) as client:
        answer = client.post("/v1/items", content=stall(), headers=NDJSON)
    assert (answer.status_code, answer.json()["stored"]) == (408, 1)
    assert "HEED_BODY_TIMEOUT" in answer.json()["detail"]


def test_long_uploads_go_on() -> None:
    """A stream of some 50 kB a second goes on, also while its items take long to be stored."""

    async def upload() -> AsyncIterator[bytes]:
        for n in range(60):
            await asyncio.sleep(0.02)
            yield b"".join(b'{"item_id": "%d-%d"}\n' % (n, line) for line in range(50))

    with serving(body_timeout=0.2) as client:
        put_items = client.engine.put_items

        async def slowly(items: Any) -> int:
            await asyncio.sleep(0.5)
            return await put_items(items)

        client.engine.put_items = slowly  # type: ignore[method-assign]
        answer = client.post("/v1/items", content=upload(), headers=NDJSON)
    assert answer.json() == {"stored": 3_000, "failed": 0, "errors": []}


def test_ndjson_elsewhere_is_no_stream(client: Client) -> None:
    """NDJSON on other routes is 415, and keeps the body limit."""
    body = orjson.dumps({"events": [{"user_id": "u" * 200, "item_id": "i"}]})
    assert client.post("/v1/events", content=body, headers=NDJSON).status_code == 413
    assert client.post("/v1/events", content=b"{}", headers=NDJSON).status_code == 415


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab\n ", max_size=12)), st.integers(1, 9))
def test_lines_do_not_depend_on_chunks(chunks: list[str], longest: int) -> None:
    async def read() -> list[tuple[int, bytes | None]]:
        async def source() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk.encode()

        return [line async for line in split_lines(source(), longest)]

    wanted = [
        (number, None if len(line) > longest else line.encode())
        for number, line in enumerate("".join(chunks).split("\n"), 1)
        if line.strip() or len(line) > longest
    ]
    assert asyncio.run(read()) == wanted


def test_other_work_runs_while_rows_are_converted() -> None:
    """A thousand rows come back in order, and other tasks run many times among them."""

    async def test() -> None:
        converted = 0
        seen: list[int] = []

        def convert(position: int, row: str) -> str:
            nonlocal converted
            converted += 1
            return f"{position}:{row}"

        async def watch() -> None:
            while converted < 1_000:
                seen.append(converted)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        rows = [f"row-{n}" for n in range(1_000)]
        records = await convert_rows(rows, convert)
        await watching
        assert records == [f"{n}:row-{n}" for n in range(1_000)]
        assert len(seen) >= 10
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 100

    asyncio.run(test())
