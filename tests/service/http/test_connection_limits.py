"""Limits on connections: endless or slow requests and idle clients do not affect others."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
import uvloop

from service.domain.keys import issue_key
from service.domain.settings import Settings
from service.engine.engine import Engine
from service.http import connection_limits
from service.http.app import create_app
from service.http.server import configure
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.http_fake import FakeEngine
from tests.support.server import Server

pytestmark = pytest.mark.verify

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = (
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
# What is never complete: how it begins, and what comes again and again.
ENDLESS = {
    "first line": (b"GET /", b"a"),
    "name of a header": (b"GET / HTTP/1.1\r\n", b"a"),
    "value of a header": (b"GET / HTTP/1.1\r\n", b"X-B:"),
    "headers": (b"GET / HTTP/1.1\r\n", b"X-B: b\r\n"),
    "lines before the first": (b"", b"\r\n"),
    "trailer": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-B:"),
    "extension of a chunk": (CHUNKED + b"2;", b"a"),
}
MiB = 2**20
PATIENCE = 60.0  # seconds, for a busy machine is no failure

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[[], Awaitable[Streams]]
Talk = Callable[[Open, FakeEngine], Awaitable[None]]


def serve(talk: Talk, **settings: Any) -> None:
    """Serve a fake engine with the given settings and run `talk` against it."""
    engine = FakeEngine()
    named = Settings(
        **{"embedding_dim": 4, "port": 0, "deadline": 30, "drain_timeout": 0, **settings}
    )

    async def run() -> None:
        server = uvicorn.Server(configure(create_app(named, engine=cast(Engine, engine)), named))
        running = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  # uvicorn offers nothing to wait for
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        opened: list[asyncio.StreamWriter] = []

        async def connect() -> Streams:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            return reader, writer

        try:
            async with asyncio.timeout(PATIENCE):
                await talk(connect, engine)
        finally:
            for writer in opened:
                writer.close()
            server.should_exit = True
            await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def status(reader: asyncio.StreamReader) -> int:
    """Read one answer; its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    return int(head.split(b" ")[1])


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes received until the connection is closed."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_headers_and_trailers_are_cut_off(kind: str) -> None:
    """An endless header, trailer or chunk extension closes the connection near the limit."""
    start, more = ENDLESS[kind]
    sent = 0

    async def talk(connect: Open, _: FakeEngine) -> None:
        nonlocal sent
        reader, writer = await connect()
        writer.write(start)
        ended = asyncio.create_task(rest(reader))
        while not ended.done() and sent < MiB:
            writer.write(more * 100)
            sent += len(more) * 100
            await asyncio.sleep(0.001)
        refusal = await ended
        if start and not start.startswith(CHUNKED):
            assert refusal.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            assert b"application/problem+json" in refusal
            assert b"HEED_MAX_HEADER_BYTES" in refusal
        reader, writer = await connect()
        writer.write(LIVE)
        assert await status(reader) == 200

    serve(talk, max_header_bytes=4096)
    assert sent < MiB


def test_header_limit_applies_to_each_request() -> None:
    def padded(size: int) -> bytes:
        return LIVE[:-2] + b"X-B: " + b"b" * (size - len(LIVE) - 7) + b"\r\n\r\n"

    async def talk(connect: Open, engine: FakeEngine) -> None:
        reader, writer = await connect()
        for _ in range(3):
            writer.write(padded(1024))
            assert await status(reader) == 200
        writer.write(padded(1000) * 5)
        assert [await status(reader) for _ in range(5)] == [200] * 5
        body = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
        writer.write(CHUNKED + body * 4 + b"0\r\n\r\n" + LIVE)
        assert [await status(reader) for _ in range(2)] == [422, 200]
        writer.write(padded(1025))
        assert await status(reader) == 431
        assert await rest(reader) == b""

    assert len(padded(1024)) == 1024
    serve(talk, max_header_bytes=1024)


def test_slow_headers_time_out() -> None:
    """A header not complete within the timeout ends the connection; a waiting client gets 408.

    What is sent after the server has closed resets the connection, and may lose its answer: only a
    client that has stopped sending must receive it.
    """

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(LIVE[:-2])
        ended = asyncio.create_task(rest(reader))
        while not ended.done():
            writer.write(b"X")
            await asyncio.sleep(0.01)
        return await ended

    async def talk(connect: Open, _: FakeEngine) -> None:
        kept = await connect()
        kept[1].write(LIVE)
        assert await status(kept[0]) == 200
        for answer in await asyncio.gather(drip(*kept), drip(*await connect())):
            assert answer == b"" or answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        reader, writer = await connect()
        writer.write(LIVE[:-2])
        answer = await rest(reader)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"HEED_HEADER_TIMEOUT" in answer

    serve(talk, header_timeout=0.2, idle_timeout=100)


def test_idle_connections_time_out() -> None:
    """An idle connection is closed without a response, before or after its first request."""

    async def talk(connect: Open, _: FakeEngine) -> None:
        fresh, used = await connect(), await connect()
        used[1].write(LIVE)
        assert await status(used[0]) == 200
        assert not any(await asyncio.gather(rest(fresh[0]), rest(used[0])))

    serve(talk, idle_timeout=1, header_timeout=100)


def test_a_refused_body_does_not_hold_its_connection() -> None:
    """After an early refusal the rest of the body must arrive within the header timeout."""

    async def talk(connect: Open, _: FakeEngine) -> None:
        reader, writer = await connect()
        writer.write(CHUNKED + b"20\r\n" + b" " * 32 + b"\r\n")
        assert await status(reader) == 429
        ended = asyncio.create_task(rest(reader))
        while not ended.done():
            writer.write(b"1\r\n \r\n")
            await asyncio.sleep(0.01)

    serve(talk, max_buffered_bytes=16, header_timeout=0.2, idle_timeout=100)


def test_a_new_connection_takes_the_place_of_an_idle_one() -> None:
    """At the limit a new connection replaces an idle one, or is closed if none is idle."""

    async def talk(connect: Open, engine: FakeEngine) -> None:
        idle = [await connect() for _ in range(3)]
        reader, writer = await connect()
        writer.write(LIVE)
        assert await status(reader) == 200
        ended = [asyncio.create_task(rest(each[0])) for each in idle]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert sum(task.done() for task in ended) == 1

        engine.gate = asyncio.Event()
        body = b'{"item_ids": ["a"]}'
        asks = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        working = []
        for _ in range(3):
            working.append(await connect())
            working[-1][1].write(asks)
            await engine.arrived.acquire()
        refused = await connect()
        assert await rest(refused[0]) == b""
        engine.gate.set()
        assert [await status(each[0]) for each in working] == [200] * 3

    serve(talk, max_connections=3)


def test_pipelined_requests_are_limited() -> None:
    """At most sixteen pipelined requests may wait; with more the connection is closed."""

    async def talk(connect: Open, _: FakeEngine) -> None:
        reader, writer = await connect()
        writer.write(LIVE * 17)
        assert [await status(reader) for _ in range(17)] == [200] * 17
        writer.write(LIVE * 1000)
        assert (await rest(reader)).count(b"HTTP/1.1") < 17

    serve(talk)


# ------------------------------------------------------------------- shares of senders

SLOW_WAIT = 1.5  # seconds after which an arriving request is slow


def post(token: str = "", path: str = "/v1/score", length: int = 1000) -> bytes:
    """The header of a request whose body of `length` bytes is still to come."""
    key = f"Authorization: Bearer {token}\r\n" if token else ""
    head = "Host: localhost\r\nContent-Type: application/json"
    return f"POST {path} HTTP/1.1\r\n{head}\r\n{key}Content-Length: {length}\r\n\r\n".encode()


SCORE = b'{"item_ids": ["a"]}'


class Drip:
    """A connection that sends its beginning, and then a byte again and again."""

    def __init__(self, streams: Streams, start: bytes, more: bytes = b" ") -> None:
        self.answer = b""
        self.writer = streams[1]
        self.writer.write(start)
        self._more = more
        self._reading = asyncio.create_task(self._read(streams[0]))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while not reader.at_eof():
            try:
                self.answer += await asyncio.wait_for(reader.read(4096), 0.1)
            except TimeoutError:
                if self.writer.is_closing():
                    return
                self.writer.write(self._more)
            except ConnectionError:
                return

    @property
    def is_held(self) -> bool:
        """True while the server has neither answered nor closed it."""
        return not self.answer and not self._reading.done()

    @property
    def is_open(self) -> bool:
        """True while the server has not closed it."""
        return not self._reading.done()


async def asked(connect: Open, request: bytes) -> int:
    """Ask on a new connection; the status."""
    reader, writer = await connect()
    writer.write(request)
    return await status(reader)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition; `serve` bounds the time."""
    while not holds():  # noqa: ASYNC110  # other code sets it
        await asyncio.sleep(0.02)


def test_slow_bodies_of_one_key_leave_all_others_served() -> None:
    async def talk(connect: Open, engine: FakeEngine) -> None:
        slow, other = engine.issue("read"), engine.issue("read")
        drips = [Drip(await connect(), post(slow)) for _ in range(110)]
        begun = time.monotonic()
        while time.monotonic() < begun + SLOW_WAIT or sum(each.is_held for each in drips) > 10:
            assert await asked(connect, LIVE) == 200
            assert await asked(connect, LIVE.replace(b"live", b"ready")) == 200
            assert await asked(connect, post(other, length=len(SCORE)) + SCORE) == 200
        assert 0 < sum(each.is_held for each in drips) <= 10
        refused = [each.answer for each in drips if each.answer]
        assert refused
        for answer in refused:
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 1\r\n" in answer.lower()
            assert b"The API key shop (" in answer
            assert b"HEED_MAX_CONNECTIONS" in answer

    serve(talk, max_connections=40, body_timeout=100)


def test_slow_headers_of_one_address_are_limited() -> None:
    """An address holds its share of connections without a complete header; the rest is closed."""

    async def talk(connect: Open, _: FakeEngine) -> None:
        silent = [Drip(await connect(), b"", b"") for _ in range(8)]
        await until(lambda: sum(each.is_open for each in silent) == 5)
        assert not any(each.answer for each in silent)
        for each in silent:
            each.writer.close()
        await until(lambda: not any(each.is_open for each in silent))
        drips = [Drip(await connect(), LIVE[:-2] + b"X-A: ") for _ in range(8)]
        await until(lambda: sum(each.is_held for each in drips) == 5)
        refused = [each.answer for each in drips if each.answer]
        assert all(each.startswith(b"HTTP/1.1 429 ") for each in refused)
        assert all(b"The address 127.0.0.1 " in each for each in refused)
        assert await asked(connect, LIVE) == 200

    serve(talk, max_connections=20, idle_timeout=100, header_timeout=100)


def test_fast_requests_of_one_key_are_not_limited() -> None:
    """64 kept connections of one key send bodies in two pieces, pause, and lose nothing."""

    async def talk(connect: Open, engine: FakeEngine) -> None:
        token = engine.issue("read")
        kept = [await connect() for _ in range(64)]
        for pause in (0.0, SLOW_WAIT, 0.0):
            await asyncio.sleep(pause)
            for _, writer in kept:
                writer.write(post(token, length=len(SCORE)) + SCORE[:5])
            await asyncio.sleep(0.05)
            for _, writer in kept:
                writer.write(SCORE[5:])
            assert [await status(reader) for reader, _ in kept] == [200] * 64

    serve(talk, max_connections=64, max_in_flight=64)


@pytest.mark.parametrize(
    ("start", "end"), [(LIVE[:20], LIVE[20:]), (post(length=len(SCORE)), SCORE)]
)
def test_a_busy_service_takes_nobody_for_slow(start: bytes, end: bytes) -> None:
    """Requests that have arrived while the service could not read are answered, not refused."""

    async def talk(connect: Open, _: FakeEngine) -> None:
        opened = [await connect() for _n in range(28)]
        for _reader, writer in opened:
            writer.write(start)
        await asyncio.sleep(0.1)
        for _reader, writer in opened:
            writer.write(end)
        time.sleep(SLOW_WAIT)  # noqa: ASYNC251  # also stops the service, in the same loop
        assert [await status(reader) for reader, _w in opened] == [200] * 28

    serve(talk, max_connections=28)


def test_the_sender_of_most_connections_gives_way() -> None:
    """Beyond the bound, kept connections of a key with few of them stay, whoever came first."""

    async def talk(connect: Open, engine: FakeEngine) -> None:
        many, few = engine.issue("read"), engine.issue("read")
        kept = [await connect() for _ in range(3)]
        for reader, writer in kept:
            writer.write(post(few, length=len(SCORE)) + SCORE)
            assert await status(reader) == 200
        drips = []
        for _ in range(30):
            drips.append(Drip(await connect(), post(many)))
            await asyncio.sleep(0.01)
        await until(lambda: sum(each.is_open for each in drips) <= 7)
        for reader, writer in kept:
            writer.write(post(few, length=len(SCORE)) + SCORE)
            assert await status(reader) == 200

    serve(talk, max_connections=10, idle_timeout=100, body_timeout=100)


def test_health_is_answered_while_all_connections_are_in_work() -> None:
    """Beyond the bound health is answered on a new connection, and all else is 429."""

    async def talk(connect: Open, engine: FakeEngine) -> None:
        engine.gate = asyncio.Event()
        ask = post(length=len(SCORE)) + SCORE
        working = []
        for _ in range(3):
            working.append(await connect())
            working[-1][1].write(ask)
            await engine.arrived.acquire()
        later = await connect()
        await asyncio.sleep(0.2)  # the bound is checked by then
        later[1].write(ask)
        assert await status(later[0]) == 429
        for path in (b"/health/live", b"/health/ready", b"/metrics"):
            assert await asked(connect, LIVE.replace(b"/health/live", path)) == 200
        engine.gate.set()
        assert [await status(each[0]) for each in working] == [200] * 3

    serve(talk, max_connections=3)


def test_connections_stay_bounded_while_a_store_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no connection can give way, a new one is closed beyond the bound and a burst."""
    monkeypatch.setattr(connection_limits, "BURST", 2)

    async def talk(connect: Open, engine: FakeEngine) -> None:
        ask = post(engine.issue("read"), length=len(SCORE)) + SCORE
        answers, begun = asyncio.Event(), asyncio.Semaphore(0)

        async def hang(_: str) -> None:
            begun.release()
            await answers.wait()

        monkeypatch.setattr(engine, "key", hang)
        opened = []
        for _n in range(4):
            opened.append(await connect())
            opened[-1][1].write(ask)
            await begun.acquire()
        for _n in range(3):
            assert await rest((await connect())[0]) == b""
        answers.set()
        assert [await status(reader) for reader, _w in opened] == [401] * 4
        assert await asked(connect, LIVE) == 200

    serve(talk, max_connections=2)


def test_clients_of_refused_bodies_and_of_long_answers_give_way() -> None:
    """Neither a body that is discarded after its 413 nor an unread answer holds a connection."""

    async def talk(connect: Open, _: FakeEngine) -> None:
        discarded = [Drip(await connect(), post(length=10**8)) for _n in range(3)]
        await until(lambda: all(each.answer for each in discarded))
        ask = post(length=len(SCORE)) + SCORE
        assert await asked(connect, ask) == 200
        await until(lambda: sum(each.is_open for each in discarded) < 3)
        for each in discarded:
            each.writer.close()
        await until(lambda: not any(each.is_open for each in discarded))
        unread = [await connect() for _n in range(3)]
        for streams in unread:
            streams[1].transport.pause_reading()  # type: ignore[attr-defined]
            streams[1].write(LIVE.replace(b"/health/live", b"/openapi.json") * 16)
        await asyncio.sleep(0.5)
        assert await asked(connect, ask) == 200
        assert await asked(connect, ask) == 200

    serve(talk, max_connections=3)


def test_an_address_in_a_header_is_not_believed() -> None:
    """A client that names other addresses in X-Forwarded-For is one sender nevertheless."""

    async def talk(connect: Open, _: FakeEngine) -> None:
        drips = []
        for n in range(8):
            head = post().replace(b"Host", b"X-Forwarded-For: 192.0.2.%d\r\nHost" % n)
            drips.append(Drip(await connect(), head))
        await until(lambda: sum(each.is_held for each in drips) == 5)
        assert all(b"The address 127.0.0.1 " in each.answer for each in drips if each.answer)

    serve(talk, max_connections=20, body_timeout=100)


# ------------------------------------------------------------------- the process, as it is served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service without data, on the limits that it has by default, but for those of bodies."""
    with Server(tmp_path_factory.mktemp("empty") / "data", body_timeout=1) as server:
        yield server


def connect(server: Server) -> socket.socket:
    """A connection."""
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), PATIENCE)


def resident(server: Server) -> float:
    """MB of memory that the process holds."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def live(server: Server) -> None:
    """Assert that /health/live is answered on a new connection."""
    with connect(server) as one:
        one.sendall(LIVE)
        assert one.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("kind", ["value of a header", "trailer"])
def test_endless_headers_freeze_nothing(server: Server, kind: str) -> None:
    """Four endless headers are cut off while others are answered, and memory grows by < 20 MB."""
    start, more = ENDLESS[kind]
    cut: list[bool] = []

    def flood() -> None:
        with connect(server) as one:
            try:
                one.sendall(start)
                for _ in range(50):
                    one.sendall(more * (MiB // len(more)))
            except ConnectionError:
                cut.append(True)

    live(server)
    before = resident(server)
    floods = [threading.Thread(target=flood) for _ in range(4)]
    for each in floods:
        each.start()
    for _ in range(20):
        live(server)
    grown = resident(server) - before
    for each in floods:
        each.join()
    assert len(cut) == 4
    assert grown < 20


def test_connections_that_do_nothing_useful_are_closed(server: Server) -> None:
    """400 dripping and 50 idle connections are closed within 15 s while requests are answered."""
    dripping, idle = ([connect(server) for _ in range(count)] for count in (400, 50))
    left = {*dripping, *idle}
    for each in left:
        each.setblocking(False)
    for each in dripping:
        each.send(LIVE[:-2])
    until = time.monotonic() + 15
    while left and time.monotonic() < until:
        for each in [*left]:
            try:
                if each in dripping:
                    each.send(b"X")
                ended = each.recv(65_536) == b""
            except BlockingIOError:
                continue
            except ConnectionError:
                ended = True
            if ended:
                left.discard(each)
        live(server)
        time.sleep(0.2)
    for each in (*dripping, *idle):
        each.close()
    assert not left


def test_client_that_reads_nothing_is_disconnected(server: Server) -> None:
    """The connection of a client that reads no answer is closed by the server."""
    live(server)
    port = int(server.url.rpartition(":")[2])
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", port))
        one.setblocking(False)
        until, closed = time.monotonic() + PATIENCE, False
        while not closed and time.monotonic() < until:
            try:
                one.send(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            except BlockingIOError:
                time.sleep(0.05)
            except ConnectionError:
                closed = True
        assert closed


@pytest.mark.parametrize("workers", [1, 2])
def test_1100_slow_bodies_of_one_key_refuse_nobody_else(tmp_path: Path, workers: int) -> None:
    """While a key holds 1,100 connections at a byte now and then, others are answered."""
    (tmp_path / "data").mkdir()
    slow, other = asyncio.run(create_keys(tmp_path / "data"))
    key = f"Host: localhost\r\nAuthorization: Bearer {other}\r\n\r\n"
    paths = ("/health/live", "/health/ready", "/metrics", "/v1/items")
    asks = [f"GET {path} HTTP/1.1\r\n{key}".encode() for path in paths]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as stack:
        served = Server(tmp_path / "data", workers=workers, max_connections=512 // workers)
        stack.enter_context(served)
        crowd = [stack.enter_context(connect(served)) for _ in range(1100)]
        for each in crowd:
            each.setblocking(False)
        held = set(crowd)
        for beginning in (post(slow), b" ", b" ", b" "):
            for each in [*held]:
                try:
                    each.send(beginning)
                except OSError:
                    held.discard(each)
            for ask in asks * 3:
                with connect(served) as one:
                    one.sendall(ask)
                    assert one.recv(65_536).startswith(b"HTTP/1.1 200"), ask


async def create_keys(data: Path) -> list[str]:
    """Store two keys of an installation, and return their tokens."""
    store = SQLiteStore(data / STORE_FILE)
    keys = [issue_key(name, frozenset({"admin"}), 0) for name in ("slow", "other")]
    for key, _ in keys:
        await store.add_key(key)
    await store.close()
    return [token for _, token in keys]
