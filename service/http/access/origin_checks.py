"""Checks of Host and Origin, against requests that pages of other sites make a browser send.

Two attacks reach a service on loopback through the browser of its user. In DNS rebinding the name
of a page resolves to 127.0.0.1, and the browser takes Heed for the page's own origin; the Host
header holds that name. In cross-site request forgery a page of another origin sends a request whose
answer it cannot read, so that only requests that write matter; they are told by the rule of Go's
`net/http.CrossOriginProtection`.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain.settings import Settings

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")  # a name or an address, and a port
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class OriginChecks:
    """Pure ASGI middleware: 421 for a host that is not allowed, 403 for a cross-site write.

    Where the service listens on every address, any IP address is an allowed host: DNS rebinding
    needs a name.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        bound = f"[{settings.host}]" if ":" in settings.host else settings.host
        listed = (name.strip().lower() for name in settings.allowed_hosts.split(","))
        self._hosts = {*_LOOPBACK, bound.lower(), *listed} - {""}
        self._origins = frozenset(settings.allowed_origins)
        self._any_address = settings.host in ("", "0.0.0.0", "::")  # noqa: S104  # binds nothing
        self._is_allowed = lru_cache(256)(self._allows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if not self._is_allowed(host):
                raise _refusal(421, f"The host {host!r} is not allowed (HEED_ALLOWED_HOSTS).")
            if scope["method"] not in _SAFE_METHODS and self._is_cross_site(headers, host):
                raise _refusal(403, "Pages of another origin may not write.")
        await self._app(scope, receive, send)

    def _is_cross_site(self, headers: dict[bytes, bytes], host: str) -> bool:
        """True for a request from a page of another origin that CORS does not allow."""
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        return origin not in self._origins and _is_cross_site(headers, host)

    def _allows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1]
        if name in self._hosts or "*" in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self._any_address


def _is_cross_site(headers: dict[bytes, bytes], host: str) -> bool:
    """True for a request from a page of another origin, by Sec-Fetch-Site or else by Origin."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in (b"same-origin", b"none")
    origin = headers.get(b"origin")  # sent by browsers alone
    return origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host


def _refusal(status: int, detail: str) -> HTTPException:
    return HTTPException(status, detail, headers={"Connection": "close"})  # its body is not read
