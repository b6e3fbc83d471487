"""HEAD requests, answered like GET without the body (RFC 9110, section 9.3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHOD = "heed.method"  # in the scope of a HEAD request: its own method


class HeadRequests:
    """Pure ASGI middleware that hands a HEAD request on as GET and drops the body of its answer.

    Every route that takes GET so takes HEAD, with the same status and headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # A copy: metrics and the server, outside, go by the method that was sent.
        inner = {**scope, "method": "GET", METHOD: "HEAD"}
        try:
            await self._app(inner, receive, send_without_body)
        finally:
            scope.update({**inner, "method": "HEAD"})
