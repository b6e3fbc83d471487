"""Limits: how requests arrive and wait their turn, within bounds of size, time and number."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.domain.errors import Crowded, DeadlineExceeded, Overloaded, TooLarge
from service.domain.keys import ApiKey
from service.domain.settings import Settings
from service.engine.compose import compute_threads
from service.http.access import Kind
from service.http.scope_keys import (
    BODY,
    BULK_TURN,
    CLIENT,
    CROWDED,
    KEY,
    METHOD,
    OPENING,
    ROW,
)
from service.http.telemetry import Metrics
from service.runtime.work_queue import Turn, WorkQueue

# connections ----------------------------------------------------------------------------


class ClientConnection:
    """One client's connection, as the requests that arrive over it see it.

    `sender` sent the last request; before the first, it is the client's address. The wait for the
    client began at `since`.
    """

    __slots__ = ("_task", "_wait", "is_lost", "refusal", "sender", "since")

    def __init__(self, sender: str = "") -> None:
        self.sender = sender
        self.since = time.monotonic()
        self.is_lost = False
        self.refusal = ""  # why the last wait was ended
        self._wait: asyncio.Timeout | None = None  # for bytes of the client
        self._task: asyncio.Task[Any] | None = None  # the work to cancel

    def lose(self) -> None:
        self.is_lost = True
        if self._task is not None:
            self._task.cancel()

    @contextmanager
    def waits(self, timer: asyncio.Timeout) -> Iterator[None]:
        """Let `refuse` end the block, a wait for the client's bytes, as its timeout would."""
        self._wait, self.refusal, self.since = timer, "", time.monotonic()
        try:
            yield
        finally:
            self._wait = None

    @property
    def is_waiting(self) -> bool:
        """True while a request waits only for the client's bytes."""
        return self._wait is not None

    def refuse(self, reason: str) -> None:
        """End the wait for the client's bytes, with `refusal` set to the reason."""
        if self._wait is not None and not self._wait.expired():
            self.refusal = reason
            self._wait.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def cancels(self) -> Iterator[None]:
        """Cancel the block's work when the client disconnects.

        Work that waits for a thread is then taken out of the queue; what a thread has begun ends.

        Raises:
            ClientDisconnect: the client has left, before the block or during it.
        """
        if self.is_lost:
            raise ClientDisconnect
        task = self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_lost:  # the deadline, or the end of the server
                raise
            if task is not None:
                task.uncancel()
            raise ClientDisconnect from None
        finally:
            self._task = None


def connection_of(scope: Scope) -> ClientConnection:
    """Return the connection of a request; one that is never lost where the server has none."""
    return scope.get(CLIENT) or ClientConnection()


_MAX_BYTES = 64 * 1024 * 1024  # read and discarded; a connection that sends more is reset
_MAX_SECONDS = 5.0


def lingering(receive: Receive, send: Send, connection: ClientConnection) -> Send:
    """Return a `send` that discards the rest of the request's body before it ends the answer.

    `connection` ends this early if its place is needed.
    """

    async def send_then_discard(message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if not is_last:
            await send(message)
            return
        await send({**message, "more_body": True})
        await _discard(receive, connection)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_then_discard


async def _discard(receive: Receive, connection: ClientConnection) -> None:
    size = 0
    try:
        async with asyncio.timeout(_MAX_SECONDS) as timer:
            with connection.waits(timer):
                while size <= _MAX_BYTES:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
    except TimeoutError:
        return


class HeadRequests:
    """Pure ASGI middleware that hands a HEAD request on as GET and drops the body of its answer.

    Every route that takes GET so takes HEAD, with the same status and headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # A copy: metrics and the server, outside, go by the method that was sent.
        inner = {**scope, "method": "GET", METHOD: "HEAD"}
        try:
            await self._app(inner, receive, send_without_body)
        finally:
            scope.update({**inner, "method": "HEAD"})


# places ---------------------------------------------------------------------------------

GRACE = 1.0  # seconds after which a header or a body is slow, and takes a place of its sender


class Places:
    """Places of one kind: at most `limit` in all, and `share` for each sender."""

    def __init__(
        self, limit: int, share: int, refused: Callable[[], None], *, kind: str, setting: str
    ) -> None:
        self._limit = limit
        self._share = share
        self._refused = refused
        self._kind = kind
        self._setting = setting
        self._held: Counter[str] = Counter()
        self.taken = 0

    def take(self, sender: str, amount: int = 1) -> None:
        """Take places for a sender. Raises `Overloaded`, which names the bound."""
        if self.taken + amount > self._limit:
            self._refused()
            raise Overloaded(f"All {self._limit} {self._kind} are taken ({self._setting}).")
        if self._held[sender] + amount > self._share:
            self._refused()
            raise Overloaded(
                f"{sender} holds its share of the {self._kind}: {self._share} of {self._limit} "
                f"({self._setting})."
            )
        self._held[sender] += amount
        self.taken += amount

    def give_back(self, sender: str, amount: int = 1) -> None:
        self.taken -= amount
        self._held[sender] -= amount
        if not self._held[sender]:
            del self._held[sender]


class Arrivals:
    """The places of one worker, which its connections and the readers of bodies share."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        count = metrics.count_refusal
        self.count_closed = partial(count, "connections")
        self.slow = Places(
            settings.max_connections,
            max(1, settings.max_connections // 4),
            self.count_closed,
            kind="connections for slow requests",
            setting="HEED_MAX_CONNECTIONS",
        )
        self.buffered = Places(
            settings.max_buffered_bytes,
            max(settings.max_body_bytes, settings.max_buffered_bytes // 4),
            partial(count, "bodies"),
            kind="bytes for bodies",
            setting="HEED_MAX_BUFFERED_BYTES",
        )
        self.streams = Places(
            settings.max_streams,
            max(1, settings.max_streams // 2),
            partial(count, "streams"),
            kind="streams",
            setting="HEED_MAX_STREAMS",
        )
        metrics.watch_places("streams", settings.max_streams, lambda: self.streams.taken)


class SlowPlace:
    """Takes a place among the slow requests if a request is still arriving after `GRACE`.

    Calls `refuse` with the reason if none is free.
    """

    def __init__(self, places: Places, sender: str, refuse: Callable[[str], None]) -> None:
        self._places = places
        self._sender = sender
        self._refuse = refuse
        self._is_taken = False
        self._timer = asyncio.get_running_loop().call_later(GRACE, self._take)

    def _take(self) -> None:
        try:
            self._places.take(self._sender)
        except Overloaded as error:
            self._refuse(error.detail)
        else:
            self._is_taken = True

    def release(self) -> None:
        """Stop the timer, and free the place if it was taken."""
        self._timer.cancel()
        if self._is_taken:
            self._is_taken = False
            self._places.give_back(self._sender)


def sender_of(scope: Scope) -> str:
    """Name the sender of a request: its key, or else its client's address."""
    key: ApiKey | None = scope.get(KEY)
    if key is not None:
        return f"The API key {key.name} ({key.key_id})"
    return address_of(scope.get("client"))


def address_of(client: tuple[str, int] | None) -> str:
    """Name a client by its address; all of an IPv6 network of 64 bits count as one client.

    Headers of proxies are not believed, for any client can send them.
    """
    return "A local client" if client is None else _named(client[0])


@lru_cache(maxsize=4096)
def _named(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return f"The address {host}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"The network {ipaddress.ip_network((address, 64), strict=False)}"
        address = address.ipv4_mapped
    return f"The address {address}"


# paths and bodies -----------------------------------------------------------------------

MIN_STREAM_RATE = 1024  # bytes a second, far below what any link carries
ITEMS_PATH = "/v1/items"
STREAM_TYPE = "application/x-ndjson"
_NOT_GZIP = HTTPException(400, "The body is no whole gzip, as its Content-Encoding says.")
MERGE_PATCH_TYPE = "application/merge-patch+json"  # RFC 7396


class Paths:
    """The outermost middleware: keeps a slash inside an id apart from the slashes between segments.

    Servers hand the path over decoded, where `/v1/items/a%2Fb` and `/v1/items/a/b` are one. This
    decodes `raw_path` again but leaves `%2F` and `%25` standing in it, so that routing sees one
    segment; `segment` undoes those two. Bytes that are no UTF-8 become surrogates, which no id may
    hold.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes | None = scope.get("raw_path")
        if raw is None and scope["type"] == "http":  # the server does not tell them apart
            path = scope["path"].replace("%", "%25")
        elif raw is not None and b"%" in raw:
            parts = (unquote_to_bytes(part) for part in raw.partition(b"?")[0].split(b"/"))
            path = "/".join(
                part.decode(errors="surrogateescape").replace("%", "%25").replace("/", "%2F")
                for part in parts
            )
        else:
            await self._app(scope, receive, send)
            return
        # A copy, because the server goes on to log the path of its own.
        await self._app({**scope, "path": path}, receive, send)


def segment(part: str) -> str:
    """Decode one segment of a path that `Paths` rewrote."""
    return part.replace("%2F", "/").replace("%25", "%")


class Bodies:
    """Reads the whole body, up to a size and within a time, before anything else happens.

    All bodies that are held at one time share `max_buffered_bytes`, so that many slow senders
    cannot fill the memory either. Streams pass through chunk by chunk, each within that time, and
    not slower than `MIN_STREAM_RATE`; their reader bounds the lines. One sender has at most its
    share of the bytes, of the streams and of the slow bodies. A gzip body, also one of lines, is
    read whole and inflated, and its size is bounded before and after.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, arrivals: Arrivals) -> None:
        self._app = app
        self._arrivals = arrivals
        self._max_body = settings.max_body_bytes
        self._timeout = settings.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if CROWDED in scope:
            self._arrivals.count_closed()
            raise Crowded(scope[CROWDED])
        connection, sender = connection_of(scope), sender_of(scope)
        connection.sender = sender
        if is_stream(scope) and not _is_compressed(scope):
            self._arrivals.streams.take(sender)
            try:
                await self._app(scope, self._paced(receive, connection), send)
            finally:
                self._arrivals.streams.give_back(sender)
        else:
            chunks: list[bytes] = []
            try:
                await self._read(scope, receive, connection, chunks)
                chunks[:] = [b"".join(chunks)]  # not held twice
                if _is_compressed(scope):
                    chunks.append(await asyncio.to_thread(self._inflated, chunks[0]))
                    self._arrivals.buffered.take(sender, len(chunks[1]))
                scope[BODY] = chunks[-1]
                if is_stream(scope):
                    receive = _replayed(chunks[-1], receive)
                await self._app(scope, receive, send)
            except TooLarge as error:
                if is_stream(scope):
                    error.detail += " Without Content-Encoding, a stream has no such limit."
                raise
            finally:
                self._arrivals.buffered.give_back(sender, sum(map(len, chunks)))

    async def _read(
        self, scope: Scope, receive: Receive, connection: ClientConnection, chunks: list[bytes]
    ) -> None:
        """Append the body to `chunks`. Raises `ClientDisconnect` when its sender goes away."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body:
                raise self._too_large()  # before a byte of it is read
        size = 0
        sender = connection.sender
        place = SlowPlace(self._arrivals.slow, sender, connection.refuse)
        try:
            async with asyncio.timeout(self._timeout) as timer:
                with connection.waits(timer):
                    more = True
                    while more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise ClientDisconnect
                        chunk = message.get("body", b"")
                        size += len(chunk)
                        if size > self._max_body:
                            raise self._too_large()
                        self._arrivals.buffered.take(sender, len(chunk))
                        chunks.append(chunk)
                        more = message.get("more_body", False)
        except TimeoutError:
            raise self._ended(connection) from None
        finally:
            place.release()

    def _paced(self, receive: Receive, connection: ClientConnection) -> Receive:
        """Wrap the `receive` of a stream; only waits for its client lower its rate."""
        waited, size = 0.0, 0

        async def paced() -> Message:
            nonlocal waited, size
            begun = time.monotonic()
            try:
                async with asyncio.timeout(self._timeout) as timer:
                    with connection.waits(timer):
                        message = await receive()
            except TimeoutError:
                raise self._ended(connection) from None
            waited += time.monotonic() - begun
            size += len(message.get("body", b""))
            if waited >= self._timeout and message.get("more_body"):
                if size < MIN_STREAM_RATE * waited:
                    raise _too_slow(
                        f"The stream sent {size} bytes in {waited:.3g} s; its client must send at "
                        f"least {MIN_STREAM_RATE} a second, over each HEED_BODY_TIMEOUT."
                    )
                waited, size = 0.0, 0
            return message

        return paced

    def _ended(self, connection: ClientConnection) -> Exception:
        if connection.refusal:
            return Crowded(connection.refusal)
        detail = f"The body took longer than {self._timeout:g} s to arrive (HEED_BODY_TIMEOUT)."
        return _too_slow(detail)

    def _inflated(self, body: bytes) -> bytes:
        """Return the bytes of a gzip body. Raises `TooLarge` beyond the size of any body."""
        inflated, rest = b"", body
        while rest:  # gzip may have several members
            member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            try:
                inflated += member.decompress(rest, self._max_body + 1 - len(inflated))
            except zlib.error:
                raise _NOT_GZIP from None
            if len(inflated) > self._max_body:
                raise self._too_large()
            if not member.eof:
                raise _NOT_GZIP
            rest = member.unused_data
        return inflated

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is larger than {self._max_body} bytes (HEED_MAX_BODY_BYTES).")


def _replayed(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _too_slow(detail: str) -> HTTPException:
    return HTTPException(408, detail, headers={"Connection": "close"})


def _unread(detail: str) -> HTTPException:
    return HTTPException(415, detail, headers={"Accept-Encoding": "gzip", "Connection": "close"})


def _is_compressed(scope: Scope) -> bool:
    """True for a gzip body. Raises HTTPException (415) for any other encoding."""
    given = [value for name, value in scope["headers"] if name == b"content-encoding"]
    encoding = str(b",".join(given), "latin-1").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise _unread(f"Content-Encoding may be gzip, not {encoding[:50]}.")
    return encoding.endswith("gzip")


def is_stream(scope: Scope) -> bool:
    """True for the one request that is read as a stream instead of whole."""
    path = scope["path"].removeprefix(scope["root_path"])
    return scope["method"] == "POST" and path == ITEMS_PATH and media_type(scope) == STREAM_TYPE


def media_type(scope: Scope) -> str:
    """The media type of a request's body, in lower case; empty without one."""
    # Starlette's `Headers` would take longer to be made than the look at all of them.
    for name, value in scope["headers"]:
        if name == b"content-type":
            return str(value, "latin-1").partition(";")[0].strip().lower()
    return ""


# admission ------------------------------------------------------------------------------

MAX_SMALL_WRITE = 50  # events or items of a request that is no bulk import

_EXEMPT = frozenset({"/health/live", "/health/ready", "/metrics"})
_SMALL = {Kind.BULK: Kind.LIGHT, Kind.IMPORT: Kind.CATALOGUE}  # with few rows in the body


class Admission:
    """Computes a few requests at once, lets the others wait their turn, ends all at the deadline.

    A request that would miss its deadline is refused at once (429 with `Retry-After`), as is one
    beyond `max_in_flight`. One key may have three quarters of those in flight, and all but one of
    the places that compute, so that another key always finds one. Bulk imports wait for questions.

    Streams have no deadline: they last as long as there is input, in places of `Arrivals`, and each
    of their batches is bulk work. What `is_exempt` picks (health, metrics) always gets in.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        threads = compute_threads(settings)
        # More places than threads, so that no thread waits for a request to be read.
        questions = WorkQueue(threads + 2, threads + 1)
        bulk = WorkQueue(3, 2, after=questions)
        imports = WorkQueue(3, 2, after=questions)
        self._queues = {Kind.QUESTION: questions, Kind.BULK: bulk, Kind.IMPORT: imports}
        most = settings.max_in_flight
        self._in_flight = Places(
            most,
            most - most // 4,
            partial(metrics.count_refusal, "requests"),
            kind="requests in flight",
            setting="HEED_MAX_IN_FLIGHT",
        )
        metrics.deadline.set(settings.deadline)
        metrics.watch_places("requests", most, lambda: self._in_flight.taken)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_exempt(scope):
            await self._app(scope, receive, send)
        elif is_stream(scope):
            scope[BULK_TURN] = partial(self._queues[Kind.IMPORT].turn, sender_of(scope))
            await self._app(scope, receive, send)
        else:
            await self._serve(kind_of(scope), scope, receive, send)

    async def _serve(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        seconds, sender = self._settings.deadline, sender_of(scope)
        self._in_flight.take(sender)
        timer = asyncio.timeout(seconds if kind.is_urgent else None)
        turn: Turn | None = None
        try:
            async with timer:
                if kind not in self._queues:
                    await self._app(scope, receive, send)
                    return
                ends = time.monotonic() + seconds if kind.is_urgent else math.inf
                async with self._queues[kind].turn(sender, ends) as turn:
                    await self._app(scope, receive, send)
        except Overloaded:
            if turn is None and kind in self._queues:  # refused by the queue
                self._metrics.count_refusal("requests")
            raise
        except (TimeoutError, DeadlineExceeded) as error:  # the latter from a computing thread
            if isinstance(error, TimeoutError) and not timer.expired():  # inside the app
                raise
            self._metrics.count_refusal("deadline")
            detail = f"Not done within {seconds:g} s (HEED_DEADLINE)."
            if (name := scope.get(OPENING)) is not None:
                detail = f"The namespace {name!r} is being opened; send the request again. {detail}"
            raise DeadlineExceeded(detail) from error
        finally:
            self._in_flight.give_back(sender)


def is_exempt(scope: Scope) -> bool:
    """True for what must answer also when the service is full: it costs nothing."""
    return scope["path"].removeprefix(scope["root_path"]) in _EXEMPT


def kind_of(scope: Scope) -> Kind:
    """Return the kind of a request, from the row of its route and the rows in its body."""
    kind = Kind.LIGHT if scope[ROW] is None else scope[ROW].kind
    return _SMALL[kind] if kind in _SMALL and not _is_bulk(scope.get(BODY, b"")) else kind


def _is_bulk(body: bytes) -> bool:
    rows = body.count(b'"item_id"')
    if b"\\u" in body:  # names may be written with escapes: every object may be a row
        rows = max(rows, body.count(b"{") - 1)
    return rows > MAX_SMALL_WRITE
