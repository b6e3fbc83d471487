"""Where a load goes."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from service.domain.errors import Invalid
from service.loadtest.client import Connection


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what stands before its paths."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @classmethod
    def of(cls, url: str) -> Target:
        """Raises `Invalid` for what is no address."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise Invalid("--url", f"{url!r} is no address; for example http://127.0.0.1:8000")
        if parts.query or parts.fragment or parts.username:
            raise Invalid("--url", "must have no user, query or fragment; a key is a --header")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    async def connect(self) -> Connection:
        """Raises `OSError`."""
        context = _trusted() if self.tls else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=context)
        return connection


@cache
def _trusted() -> ssl.SSLContext:
    """The system's certificates, which take some milliseconds to read."""
    return ssl.create_default_context()
