"""Serving the app with uvicorn, in one process or in workers that share the port."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from rich.console import Console
from rich.logging import RichHandler

from service.domain.errors import Invalid
from service.domain.settings import PREFIX, Settings, check_bind_address, unknown_variables
from service.engine.engine import open_engine
from service.engine.preload import preload
from service.http.app import create_app
from service.http.examples import suggest
from service.http.routes import health
from service.http.uvicorn_config import configure
from service.maintenance.backups.backup import find_namespaces
from service.runtime.data_layout import STORE_FILE
from service.runtime.prefork import PreforkServer
from service.runtime.worker_messages import WorkerPeers, worker_sockets
from service.snapshots.live_snapshot import PreloadedSnapshot
from service.stores.sqlite_files.kept_copies import remove_kept_copies

_log = logging.getLogger(__name__)

_REFRESH = 5.0  # seconds for the other workers to serve items that were written
_FOLLOW = 60.0  # seconds for the other workers to load a model that was activated
_GRACE = 5.0  # seconds beyond those to drain, after which a worker is killed


class _Server(uvicorn.Server):
    """uvicorn's server, which prints its address and example requests once it listens."""

    def __init__(
        self, config: uvicorn.Config, console: Console | None, examples: list[str]
    ) -> None:
        super().__init__(config)
        self._console = console
        self._examples = examples

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Stop; at the second Ctrl-C, at once.

        Unlike uvicorn's own, it does not end the process by the same signal afterwards: a stop on
        request is a success.
        """
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then print."""
        await super().startup(sockets=sockets)
        if not self.started or self._console is None:
            return
        port = self.servers[0].sockets[0].getsockname()[1]
        host = self.config.host if ":" not in self.config.host else f"[{self.config.host}]"
        base = f"http://{host}:{port}"
        hint = "open it in a browser; the API is at /docs"
        self._console.print(f"\n[bold]Heed serves on {base}[/]  ({hint})")
        for example in self._examples:
            self._console.print(
                example.replace("BASE", base), highlight=False, markup=False, soft_wrap=True
            )
        self._console.print("\nStop with Ctrl-C.", style="dim")


def run(settings: Settings, console: Console, *, examples: bool) -> None:
    """Serve until SIGINT or SIGTERM, then let requests in flight finish.

    Raises:
        Invalid: when the address would be open to other machines.
        Corrupt: naming the file of the store or of the model that fails its checks.
    """
    check_bind_address(settings)
    for sentence in unknown_variables(os.environ):
        console.print(f"warning: {sentence}", markup=False, highlight=False)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False)],
    )

    if settings.workers > 1:
        _share(settings, console, examples=examples)
    else:
        with contextlib.ExitStack() as stack:
            sockets = _bind_all(settings.host, settings.port, shared=False)
            for each in sockets:  # closed also if the service cannot start
                stack.enter_context(each)
            runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            runner.run(_serve(settings, console, sockets, examples=examples))
    # Started and stopped: nobody needs to go back to the Heed before a migration any more.
    for _, data in find_namespaces(settings.data):
        for path in remove_kept_copies(data / STORE_FILE):
            _log.info("%s, kept from before a migration, was removed", path)


async def _serve(
    settings: Settings,
    console: Console | None,
    sockets: list[socket.socket],
    *,
    examples: bool,
    loaded: PreloadedSnapshot | None = None,
    peers: WorkerPeers | None = None,
) -> None:
    """Serve in this process, which may be one of several workers: it talks to its `peers`.

    Without a console nothing is printed. `loaded` is the snapshot from before the fork.
    """
    engine = await open_engine(settings, preloaded=loaded)
    tries = await suggest(engine) if examples and console else []
    app = create_app(settings, engine=engine)
    app.state.peers = peers
    # What is loaded by now stays: the collector need not walk it again at every generation,
    # which is a fifth of the time of ingestion otherwise.
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":  # connections inherit it, and end when their clients stop reading
        for each in sockets:
            unread = int(settings.body_timeout * 1000)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread)
    config = configure(app, settings)
    server = _Server(config, console, tries)
    if peers is None:
        await server.serve(sockets)
        return
    engine.announce = partial(peers.ask, "follow", _FOLLOW)
    catalogue = engine.live.catalogue
    catalogue.refresh_peers = partial(peers.ask, "refresh", _REFRESH)

    async def follow() -> bytes:
        await engine.live.follow_registry()
        return engine.live.snapshot.version.encode()

    async def refresh() -> bytes:
        await catalogue.catch_up()
        return b"refreshed"

    answering = await peers.listen(
        {"follow": follow, "refresh": refresh, "metrics": partial(health.render_metrics, app)}
    )
    try:
        await server.serve(sockets)
    finally:
        answering.close()


def _share(settings: Settings, console: Console, *, examples: bool) -> None:
    """Load once, and fork workers that share the memory of the model and the port.

    Each worker listens on a socket of its own, over which the kernel spreads connections evenly.
    Were one socket shared, the worker that wakes first would accept all connections of a burst.
    """
    if sys.platform != "linux":
        raise Invalid("", f"{PREFIX}WORKERS is {settings.workers}, but only Linux can share so: 1")
    bound = _bind_all(settings.host, settings.port, shared=True)
    loaded = preload(settings)
    points = worker_sockets(settings.workers)

    def work(number: int, first: bool) -> None:
        form = logging.Formatter(f"worker {number}: %(message)s")
        for handler in logging.getLogger().handlers:
            handler.setFormatter(form)
        speaks = console if number == 0 and first else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                _serve(
                    settings,
                    speaks,
                    [_bind(one.family, one.getsockname(), shared=True) for one in bound],
                    examples=examples,
                    loaded=loaded,
                    peers=WorkerPeers(points, number),
                )
            )

    PreforkServer(settings.workers, work, grace=settings.drain_timeout + _GRACE).run()


def _bind_all(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Bind a socket to each address of a host. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
    except OSError:
        one.close()
        raise
    return one
