"""The server: sockets, workers and uvicorn, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from rich.console import Console

from service import __version__
from service.domain.errors import Invalid
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.settings import PREFIX, Settings, unknown_variables
from service.engine.compose import preload
from service.engine.engine import Engine, open_engine
from service.engine.namespaces import Namespaces
from service.http.app import create_app
from service.http.connection_limits import BURST, Crowd, LimitedHttpProtocol
from service.http.keys import prepare_keys
from service.http.limits import Arrivals
from service.http.rate_limits import RateLimits
from service.http.routes import running
from service.http.telemetry import export_measurements
from service.runtime import logs, tracing
from service.runtime.data_layout import STORE_FILE, namespace_folder, namespace_names
from service.runtime.workers import (
    PreforkServer,
    ShutdownLimit,
    WorkerPeers,
    WorkerTable,
    worker_sockets,
)
from service.snapshots.live_snapshot import Served
from service.stores.opening import is_shared
from service.stores.sqlite.copies import remove_kept_copies

_FILES = 512  # for the store, models, other workers and namespaces

_log = logging.getLogger(__name__)


def fit_connections(settings: Settings) -> Settings:
    """Raise the limit on open files for `max_connections`; lower these to fit the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + BURST + _FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return settings
    kept = max(1, allowed // 4, allowed - BURST - _FILES)
    _log.warning(
        "HEED_MAX_CONNECTIONS is %d, which takes %d open files; the limit is %d, so that a worker "
        "keeps %d connections. Raise the limit (ulimit -n, LimitNOFILE=)",
        settings.max_connections,
        wanted,
        allowed,
        kept,
    )
    return settings.model_copy(update={"max_connections": kept})


def configure(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """The server's configuration for an ASGI app; the loop is the caller's, uvloop's."""
    arrivals: Arrivals = app.state.arrivals
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="none",
        http=partial(  # type: ignore[arg-type]  # is called
            LimitedHttpProtocol,
            settings=settings,
            arrivals=arrivals,
            crowd=Crowd(settings.max_connections, arrivals),
        ),
        ws="none",
        proxy_headers=False,  # any client can forge them
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.idle_timeout,
        timeout_graceful_shutdown=int(settings.drain_timeout) + 1,
    )


OnServing = Callable[[Engine, Console, str], Coroutine[Any, Any, None]]

_REFRESH = 5.0  # seconds for the other workers to serve items that were written
_FOLLOW = 60.0  # seconds for the other workers to load a model that was activated
_CLOSED = b"closed"  # the answer of a worker that reads the namespace when it opens it
# Seconds after which a thread that computes lets the event loop run. Each such thread would add
# Python's own 5 ms to the latency of everything else, at each point where that lets go of the lock.
_SWITCH_INTERVAL = 0.0002
# Thresholds of the garbage collector. By Python's default of 700 new objects, a body of 100,000
# numbers takes ten times as long.
_COLLECTED = (50_000, 20, 20)
_CLOSING = 5.0  # seconds beyond those to drain, after which a process ends as it is
_OTHER = f"give one of its own with --host or {PREFIX}HOST, such as 127.0.0.1"
_EVERY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104  # compared with, not bound
_GRACE = 2.0  # seconds beyond all those, after which a worker is killed


class _Server(uvicorn.Server):
    """uvicorn's server, which prints its address once it listens, and works beside from then on."""

    def __init__(
        self,
        settings: Settings,
        app: FastAPI,
        console: Console | None,
        on_serving: OnServing | None,
    ) -> None:
        super().__init__(configure(app, settings))
        self._namespaces: Namespaces = app.state.namespaces
        self._limit = ShutdownLimit(settings.drain_timeout + _CLOSING, abandon=self._abandon)
        self._console = console
        self._on_serving = on_serving
        self._beside: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Stop; at the second Ctrl-C, at once.

        Unlike uvicorn's own, it does not end the process by the same signal afterwards: a stop on
        request is a success.
        """
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self._limit.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and let requests in flight finish."""
        _log.info("stopping")
        if self._beside is not None:
            self._beside.cancel()
        await super().shutdown(sockets=sockets)
        _log.info("stopped")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then print."""
        await super().startup(sockets=sockets)
        if not self.started:
            return
        port = self.servers[0].sockets[0].getsockname()[1]
        _log.info("serving", extra={"host": self.config.host, "port": port, "version": __version__})
        if self._console is None:
            return
        where, base = _told(self.config.host, port)
        hint = "the page is at /, the API at /docs; stop with Ctrl-C"
        self._console.print(f"\n[bold]Heed serves {where}[/]  ({hint})")
        if self._on_serving is not None:
            engine = self._namespaces.default
            self._beside = asyncio.create_task(self._on_serving(engine, self._console, base))

    def _abandon(self) -> None:
        for opened in self._namespaces.engines().values():
            opened.abandon()


def _told(host: str, port: int) -> tuple[str, str]:
    """Return where a service is, and the address in examples.

    One on every address may be published under any other, as that of a container: none is named.
    """
    if host in _EVERY_ADDRESS:
        return f"port {port} of every address", f"http://localhost:{port}"
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return f"on {base}", base


def run(
    settings: Settings,
    console: Console,
    *,
    on_serving: OnServing | None = None,
    with_first_key: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM, then let requests in flight finish.

    With `with_first_key`, an installation without any API key gets one. `on_serving` is called with
    the address once it is served; it runs beside the requests and is cancelled with the service.

    Raises:
        Invalid: when the address would be open to other machines.
        Corrupt: naming the file of the store or of the model that fails its checks.
    """
    prepare_keys(settings, console, with_first_key=with_first_key)
    for sentence in unknown_variables(os.environ):
        _log.warning("%s", sentence)
    settings = fit_connections(settings)
    if settings.workers > 1:
        _share(settings, console, on_serving=on_serving)
    else:
        with contextlib.ExitStack() as stack:
            sockets = _bind_all(settings.host, settings.port, shared=False)
            for each in sockets:  # closed also if the service cannot start
                stack.enter_context(each)
            runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            runner.run(_serve(settings, console, sockets, on_serving=on_serving))
    if is_shared(settings.store):
        return
    # Started and stopped: nobody needs to go back to the Heed before a migration any more.
    for name in (DEFAULT_NAMESPACE, *namespace_names(settings.data)):
        store = namespace_folder(settings.data, name) / STORE_FILE
        for path in remove_kept_copies(store):
            _log.info("%s, kept from before a migration, was removed", path)


async def _serve(
    settings: Settings,
    console: Console | None,
    sockets: list[socket.socket],
    *,
    on_serving: OnServing | None,
    loaded: Served | None = None,
    peers: WorkerPeers | None = None,
    rates: RateLimits | None = None,
) -> None:
    """Serve in this process, which may be one of several workers: it talks to its `peers`.

    Without a console nothing is printed. `loaded` is the snapshot from before the fork.
    """
    engine = await open_engine(settings, preloaded=loaded)
    app = create_app(settings, engine=engine, rates=rates)
    app.state.peers = peers
    # All that is loaded by now stays: the collector need not walk it again at every generation,
    # which is a fifth of the time of ingestion otherwise.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTED)
    gc.enable()  # until here it was disabled
    sys.setswitchinterval(_SWITCH_INTERVAL)
    if sys.platform == "linux":  # connections inherit it, and end when their clients stop reading
        for each in sockets:
            unread = int(settings.body_timeout * 1000)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread)
    if tracing.start(__version__):
        export_measurements(engine)
    try:
        await _listen(_Server(settings, app, console, on_serving), sockets, app, peers)
    finally:
        await asyncio.to_thread(tracing.stop)


async def _listen(
    server: _Server,
    sockets: list[socket.socket],
    app: FastAPI,
    peers: WorkerPeers | None,
) -> None:
    """Serve the app until it is stopped, and answer the other workers."""
    namespaces: Namespaces = app.state.namespaces
    if peers is None:
        await server.serve(sockets)
        return

    def connect(name: str, opened: Engine) -> None:
        opened.announce = partial(peers.ask, f"follow {name}", _FOLLOW)
        opened.live.catalogue.refresh_peers = partial(peers.ask, f"refresh {name}", _REFRESH)

    async def follow(name: str) -> bytes:
        if (opened := await namespaces.when_opened(name)) is None:
            return _CLOSED
        await opened.live.follow_registry()
        return opened.live.snapshot.version.encode()

    async def refresh(name: str) -> bytes:
        if (opened := await namespaces.when_opened(name)) is None:
            return _CLOSED
        await opened.live.catalogue.catch_up()
        return b"refreshed"

    async def ping(_: str) -> bytes:
        return b"pong"

    namespaces.on_open(connect)
    answering = await peers.listen(
        {
            "follow": follow,
            "refresh": refresh,
            "metrics": partial(running.render_metrics, app),
            "ping": ping,
        }
    )
    beating = asyncio.create_task(peers.table.keep_beating(peers.number))
    try:
        await server.serve(sockets)
    finally:
        beating.cancel()
        answering.close()


def _share(settings: Settings, console: Console, *, on_serving: OnServing | None) -> None:
    """Load once, and fork workers that share the memory of the model and the port.

    Each worker listens on a socket of its own, over which the kernel spreads connections evenly.
    Were one socket shared, the worker that wakes first would accept all connections of a burst.
    """
    if sys.platform != "linux":
        raise Invalid("", f"{PREFIX}WORKERS is {settings.workers}, but only Linux can share so: 1")
    bound = _bind_all(settings.host, settings.port, shared=True)
    loaded = preload(settings)
    points = worker_sockets(settings.workers)
    rates = RateLimits()  # before the fork, so that all workers count together
    table = WorkerTable(settings.workers)

    def work(number: int, first: bool) -> None:
        logs.set_process_fields(worker=number)
        speaks = console if number == 0 and first else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                _serve(
                    settings,
                    speaks,
                    [_bind(one.family, one.getsockname(), shared=True) for one in bound],
                    on_serving=on_serving,
                    loaded=loaded,
                    peers=WorkerPeers(points, number, table),
                    rates=rates,
                )
            )

    PreforkServer(
        work,
        grace=settings.drain_timeout + _CLOSING + _GRACE,
        patience=settings.worker_timeout,
        table=table,
    ).run()


def _bind_all(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Bind a socket to each address of a host. Raises `Invalid` where that is not possible."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise Invalid("", f"cannot find the host {host!r} ({error.strerror}): {_OTHER}") from error
    bound = []
    for family, address in dict.fromkeys((each[0], each[4]) for each in found):
        # Alone first: that sockets share a port must not hide that another service is there.
        one = _bind(family, address, shared=False)
        if shared:
            one.close()
            one = _bind(family, address, shared=True)
        bound.append(one)
    return bound


def _bind(family: int, address: Any, *, shared: bool) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except OSError as error:
        one.close()
        raise Invalid("", _unbound(error, *address[:2])) from error
    return one


def _unbound(error: OSError, host: str, port: int) -> str:
    """Return the sentence about an address that cannot be bound, and what to do."""
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use: another program, perhaps another Heed, listens on {at}. Stop "
            f"it, or serve on another port with --port or {PREFIX}PORT"
        )
    if error.errno == errno.EACCES:
        return (
            f"port {port} is only for root: ports from 1024 on are for everybody. Give one with "
            f"--port or {PREFIX}PORT"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: {_OTHER}"
    return f"cannot listen on {at}: {error.strerror}"
