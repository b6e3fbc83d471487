"""Configuration of uvicorn."""

from __future__ import annotations

from functools import partial

import uvicorn
from fastapi import FastAPI

from service.domain.settings import Settings
from service.http.arrivals import Arrivals
from service.http.serving.connection_limits import Crowd, LimitedHttpProtocol


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
