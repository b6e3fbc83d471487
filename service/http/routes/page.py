"""The page at `/`: files that a browser runs, speaking the public API and nothing else.

There is no build step, and nothing comes from elsewhere: the page works without a network.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)

_files = StaticFiles(directory=Path(__file__).parents[1] / "playground")
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


@router.get("/")
async def page(request: Request) -> Response:
    """The page."""
    return await file("index.html", request)


@router.get("/playground/{name}")
async def file(name: str, request: Request) -> Response:
    """One of its files."""
    response = await _files.get_response(name, request.scope)
    response.headers.update(_HEADERS)
    return response
