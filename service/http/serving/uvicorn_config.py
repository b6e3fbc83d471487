"""Configuration of uvicorn."""

from __future__ import annotations

from functools import partial
from typing import Any

import uvicorn

from service.domain.settings import Settings
from service.http.serving.connection_limits import LimitedHttpProtocol


def configure(app: Any, settings: Settings) -> uvicorn.Config:
    """The server's configuration for an ASGI app; the loop is the caller's, uvloop's."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="none",
        http=partial(LimitedHttpProtocol, settings=settings),  # type: ignore[arg-type]  # is called
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.idle_timeout,
        timeout_graceful_shutdown=int(settings.drain_timeout) + 1,
    )
