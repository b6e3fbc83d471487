"""uvicorn on a thread, for tests to which a process of its own would prove nothing more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from service.domain.settings import Settings
from service.http.server import configure


@contextmanager
def serving_app(app: FastAPI) -> Iterator[int]:
    """Serve an app on a free port, which is yielded, until the block ends."""
    server = uvicorn.Server(configure(app, Settings(port=0, drain_timeout=1)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield int(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
