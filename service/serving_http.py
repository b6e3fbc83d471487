"""uvicorn around the app, and what a person reads when it is up."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from types import FrameType

import uvicorn
from rich.console import Console
from rich.logging import RichHandler

from service.app import create_app
from service.engine import open_engine
from service.listening import configure
from service.settings import Settings, refuse_exposure, unknown_variables
from service.suggestions import suggest


class _Server(uvicorn.Server):
    """Says where it listens, and what to try, once it does."""

    def __init__(self, config: uvicorn.Config, console: Console, examples: list[str]) -> None:
        super().__init__(config)
        self._console = console
        self._examples = examples

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Stop. Told twice by Ctrl-C, stop at once.

        Unlike uvicorn's own, it does not end the process by the same signal afterwards: to have
        stopped when told to is a success.
        """
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind, then speak."""
        await super().startup(sockets=sockets)
        if not self.started:
            return
        port = self.servers[0].sockets[0].getsockname()[1]
        host = self.config.host if ":" not in self.config.host else f"[{self.config.host}]"
        base = f"http://{host}:{port}"
        told = "open it in a browser; the API is at /docs"
        self._console.print(f"\n[bold]Heed serves on {base}[/]  ({told})")
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
    refuse_exposure(settings)
    for sentence in unknown_variables(os.environ):
        console.print(f"warning: {sentence}", markup=False, highlight=False)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False)],
    )

    async def serve() -> None:
        engine = await open_engine(settings)
        tries = await suggest(engine) if examples else []
        app = create_app(settings, engine=engine)
        # What is loaded by now stays: the collector need not walk it again at every generation,
        # which is a fifth of the time of ingestion otherwise.
        gc.collect()
        gc.freeze()
        config = configure(app, settings.host, settings.port, settings.drain)
        await _Server(config, console, tries).serve()

    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(serve())


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()
