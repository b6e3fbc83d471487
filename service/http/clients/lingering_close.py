"""Lingering close: the rest of a refused body is read, so that the refusal reaches its sender.

A connection that is closed while bytes of the client are unread is reset, and a reset discards the
answer on its way. Clients that send the whole body before they read, as http.client does, would see
the reset alone.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Send

from service.http.clients.disconnects import ClientConnection

_MAX_BYTES = 64 * 1024 * 1024  # read and discarded; whoever sends more is reset
_MAX_SECONDS = 5.0


def lingering(receive: Receive, send: Send, connection: ClientConnection) -> Send:
    """Return a `send` that discards the rest of the request's body before it ends the answer.

    `connection` ends this early if its place is needed.
    """

    async def send_then_discard(message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if not is_last:
            await send(message)
            return
        await send({**message, "more_body": True})
        await _discard(receive, connection)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_then_discard


async def _discard(receive: Receive, connection: ClientConnection) -> None:
    size = 0
    try:
        async with asyncio.timeout(_MAX_SECONDS) as timer:
            with connection.waits(timer):
                while size <= _MAX_BYTES:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
    except TimeoutError:
        return
