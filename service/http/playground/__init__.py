"""The page at `/`: files that a browser runs, speaking the public API and nothing else.

There is no build step, and nothing comes from elsewhere: the page works without a network.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and requests are this service's own alone: what a title or a description holds
# can run nothing, whatever it looks like.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for anew each time, and answered with 304 while the same
}


class _File(NamedTuple):
    content: bytes
    kind: str
    tag: str


@cache
def _files() -> dict[str, _File]:
    """The files of the page by name."""
    found = {}
    for entry in files(__name__).iterdir():
        kind = _TYPES.get(entry.name[entry.name.rfind(".") :])
        if kind is not None:
            content = entry.read_bytes()
            tag = hashlib.blake2b(content, digest_size=12).hexdigest()
            found[entry.name] = _File(content, kind, f'"{tag}"')
    return found


@router.get("/")
async def page(request: Request) -> Response:
    """The page."""
    return _sent("index.html", request)


@router.get("/playground/{name}")
async def file(name: str, request: Request) -> Response:
    """One of its files."""
    return _sent(name, request)


def _sent(name: str, request: Request) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404, f"The page has no file {name!r}.")
    headers = {**_HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)
