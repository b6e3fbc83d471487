"""Clients that leave, send too much or send HEAD, seen from their side of a real connection."""

from __future__ import annotations

import asyncio
import http.client
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import httpx
import psycopg
import pytest

from service.domain import errors
from service.runtime.data_layout import without_folders
from service.stores.postgres import faults
from service.stores.sqlite import database_file
from tests.service.http.test_connection_limits import Open, rest, serve, status
from tests.support.http_fake import Client, FakeEngine, serving

ASKED = (
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 18\r\n\r\n{"item_ids":["a"]}'
)
METRICS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
MAX_BODY = 60_000


@pytest.fixture
def client() -> Iterator[Client]:
    with serving() as client:
        yield client


# ------------------------------------------------------------------------ clients that leave


def test_an_aborted_upload_is_counted_as_499(caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves in the middle of its body counts as 499, and nothing is logged."""

    async def talk(connect: Open, _engine: FakeEngine) -> None:
        _, writer = await connect()
        writer.write(ASKED[:-5])
        await writer.drain()
        writer.transport.abort()
        assert await counted(connect, 499) == 1
        assert await counted(connect, 500) == 0

    serve(talk)
    assert [record.getMessage() for record in caplog.records if record.levelno >= 30] == []


def test_questions_of_clients_that_left_are_dropped() -> None:
    """A burst of questions whose clients leave frees its places, and none of them is answered."""

    async def talk(connect: Open, engine: FakeEngine) -> None:
        engine.gate = asyncio.Event()  # opened by nobody: an answer would have to wait for ever
        for _ in range(8):
            _, writer = await connect()
            writer.write(ASKED)
            await engine.arrived.acquire()
            writer.transport.abort()
        assert await counted(connect, 499) == 8
        engine.gate.set()
        reader, writer = await connect()
        writer.write(ASKED)
        assert await status(reader) != 429

    serve(talk, max_in_flight=8)


def test_writes_of_clients_that_left_are_completed() -> None:
    """A write goes on without its client, who cannot know whether it was stored."""

    async def talk(connect: Open, engine: FakeEngine) -> None:
        engine.gate = asyncio.Event()
        _, writer = await connect()
        body = b'{"items":[{"item_id":"kept"}]}'
        head = ASKED.partition(b"Content-Length")[0].replace(b"score", b"items")
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await engine.arrived.acquire()
        writer.transport.abort()
        await asyncio.sleep(0.1)
        engine.gate.set()
        while "kept" not in engine.items:  # noqa: ASYNC110  # `serve` bounds the wait
            await asyncio.sleep(0.01)

    serve(talk)


async def counted(connect: Open, code: int) -> int:
    """Return how many POST requests ended with a status, once none is in flight but this one."""
    while True:
        reader, writer = await connect()
        writer.write(METRICS)
        text = (await rest(reader)).decode()
        if "heed_http_in_flight 1.0" in text:
            found = re.search(rf'requests_total{{method="POST".*status="{code}"}} (\d+)', text)
            return int(found.group(1)) if found else 0
        await asyncio.sleep(0.01)


# ------------------------------------------------------------------------ bodies that are refused


def by_http_client(port: int) -> int:
    """Send with Python's own client, which sends the whole body before it reads."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/v1/score", b" " * 8_000_000, HEADERS)
        return connection.getresponse().status
    finally:
        connection.close()


def by_httpx(port: int) -> int:
    """Send with httpx, in chunks of unknown number."""
    body = (b" " * 100_000 for _ in range(80))
    url = f"http://127.0.0.1:{port}/v1/score"
    return httpx.post(url, content=body, headers=HEADERS, timeout=30).status_code


def by_curl(port: int) -> int:
    """Send with curl, which is told to wait for no permission."""
    url = f"http://127.0.0.1:{port}/v1/score"
    options = [
        "-s",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "-H",
        "Expect:",
        "--data-binary",
        "@-",
    ]
    named = ["-H", "Content-Type: application/json"]
    done = subprocess.run(
        ["curl", *options, *named, url], input=b" " * 8_000_000, capture_output=True, check=True
    )
    return int(done.stdout)


HEADERS = {"Content-Type": "application/json"}


@pytest.mark.parametrize("send", [by_http_client, by_httpx, by_curl])
def test_the_sender_of_a_large_body_reads_its_413(send: Any) -> None:
    """A client that sends a body far above the limit receives the 413, not a reset."""

    async def talk(connect: Open, _engine: FakeEngine) -> None:
        _, writer = await connect()
        port: int = writer.get_extra_info("peername")[1]
        for _ in range(3):
            assert await asyncio.to_thread(send, port) == 413

    serve(talk, max_body_bytes=MAX_BODY)


# ------------------------------------------------------------------------ HEAD


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", "/openapi.json", "/health/live", "/health/ready", "/metrics", "/v1/items",
     "/v1/models", "/v1/jobs", "/v1/items/nope", "/nope"],
)  # fmt: skip
def test_head_answers_like_get_without_a_body(client: Client, path: str) -> None:
    got, head = client.get(path), client.request("HEAD", path)
    assert head.status_code == got.status_code
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.content == b""


def test_head_of_what_cannot_be_read_is_refused(client: Client) -> None:
    """HEAD of a route without GET is a 405, and a 405 names HEAD wherever GET is allowed."""
    refused = client.request("HEAD", "/v1/score")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert client.request("PUT", "/v1/items").headers["allow"] == "GET, HEAD, POST"


# ------------------------------------------------------------------------ what errors reveal

SECRETS = ("db.internal", "10.1.2.3", "5544", "shopkeeper", "ledger", "/srv", "my shop", "heed.db")
REPLY = (
    'connection to server at "db.internal" (10.1.2.3), port 5544 failed: FATAL:  role "shopkeeper" '
    'is not permitted to open database "ledger" in "/srv/my shop/heed.db"'
)
PLACE = Path("/srv/my shop/data/heed.db")
# Errors whose details are written for clients.
FOR_CLIENTS = {
    *(errors.Invalid, errors.NotFound, errors.Conflict, errors.TooLarge, errors.QuotaExceeded),
    *(errors.Busy, errors.Overloaded, errors.RateLimited, errors.DeadlineExceeded),
    errors.ModelRejected,
}


def subclasses(kind: type[Any]) -> set[type[Any]]:
    """All classes below one."""
    return {kind} | {each for direct in kind.__subclasses__() for each in subclasses(direct)}


def of_postgres(kind: type[psycopg.Error]) -> Exception:
    """Heed's error for an error of PostgreSQL."""
    return faults.explain(kind(REPLY))


def of_sqlite(kind: type[Exception]) -> Exception:
    """Heed's error for an error of SQLite or the disk."""
    error = kind(5, REPLY, str(PLACE)) if issubclass(kind, OSError) else kind(REPLY)
    return database_file.explain(PLACE, error)[0]


def of_heed(kind: type[errors.HeedError]) -> Exception:
    """An error of Heed whose detail names things that clients must not see."""
    return kind(REPLY)


FAILURES: list[tuple[Callable[..., Exception], type[Any]]] = [
    *((of_postgres, kind) for kind in subclasses(psycopg.Error)),
    *((of_sqlite, kind) for kind in [*subclasses(apsw.Error), OSError, PermissionError]),
    *(
        (of_heed, kind)
        for kind in subclasses(errors.HeedError)
        if not issubclass(kind, tuple(FOR_CLIENTS))
    ),
]


def test_no_error_tells_clients_of_hosts_and_folders(caplog: pytest.LogCaptureFixture) -> None:
    """For each failure of a store the body says what to do; the log has the rest by its id."""
    revealed, unlogged = [], []
    with serving() as client:
        for make, kind in FAILURES:
            caplog.clear()
            error = client.engine.raises = make(kind)
            answer = client.post("/v1/score", json={"item_ids": ["a"]})
            problem = answer.json()
            assert problem["status"] >= 429, kind
            said = answer.text.replace(problem["request_id"], "")  # it may have any digits
            if any(each in said for each in SECRETS) or not problem["detail"]:
                revealed.append((kind, answer.text))
            if problem["request_id"] not in caplog.text or str(error) not in caplog.text:
                unlogged.append((kind, caplog.text))
    assert len(FAILURES) > 200
    assert (revealed, unlogged) == ([], [])


def test_a_rejected_model_is_named_without_folders(caplog: pytest.LogCaptureFixture) -> None:
    """The reason names the files to mend, and the log has their paths."""
    detail = "v1/weights.safetensors: it was made by /srv/shop/models/mini, not ./srv/shop/other"
    with serving() as client:
        client.engine.raises = errors.ModelRejected(detail)
        answer = client.post("/v1/score", json={"item_ids": ["a"]})
    assert answer.json()["detail"] == "v1/weights.safetensors: it was made by mini, not other"
    assert "/srv/shop" in caplog.text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/a/heed.db: damaged", "heed.db: damaged"),
        ("'data/heed.db' and \"../a/b\"", "'data/heed.db' and \"b\""),
        ("see https://example.org/a/b, 10/s and/or", "see https://example.org/a/b, 10/s and/or"),
    ],
)
def test_folders_are_left_out_of_messages(text: str, left: str) -> None:
    """Absolute paths lose their folders; URLs, rates and words keep their slashes."""
    assert without_folders(text) == left
