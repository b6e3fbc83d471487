"""The service under load: its address and aiohttp sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx

from service.domain.errors import Invalid

# uvicorn closes a connection after 5 s without a request.
_KEEP_ALIVE = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Target:
    """A service and the headers of requests to it.

    Attributes:
        url: without a slash at its end.
        headers: sent with every request.
    """

    url: str
    headers: Sequence[tuple[str, str]] = ()

    @classmethod
    def parse(cls, text: str, headers: Sequence[tuple[str, str]] = ()) -> Target:
        """Parse a URL. Raises `Invalid` for anything but an http or https address."""
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise Invalid("--url", f"{text!r} is no address; for example http://127.0.0.1:8000")
        if url.query or url.fragment or url.userinfo:
            raise Invalid("--url", "must have no user, query or fragment; a key is a --header")
        return cls(str(url).rstrip("/"), headers)

    def open(self, on_connect: Callable[[], None] = lambda: None) -> aiohttp.ClientSession:
        """Open a session of any number of connections without timeouts; the caller closes it.

        Args:
            on_connect: called for each new connection.
        """

        async def connecting(_: aiohttp.ClientSession, __: SimpleNamespace, ___: Any) -> None:
            on_connect()

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(connecting)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            headers=[("content-type", "application/json"), *self.headers],
            skip_auto_headers=("accept", "accept-encoding", "user-agent"),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[trace],
        )
