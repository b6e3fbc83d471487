"""uvicorn as Heed runs it."""

from __future__ import annotations

from typing import Any

import uvicorn


def configure(app: Any, host: str, port: int, drain: float) -> uvicorn.Config:
    """The server's configuration for an ASGI app; the loop is the caller's, uvloop's."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="none",
        http="httptools",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(drain) + 1,
    )
