"""The page at `/` and the API's documentation at `/docs`: files that a browser runs.

They speak the public API and nothing else. There is no build step, and scripts, styles and
requests are this service's own: both work without a network. Pictures of items come from wherever
the catalogue says, if they are mapped.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from service.domain.errors import NotFound
from service.domain.settings import PICTURES, Settings, parse_page_fields
from service.http.routes.context import Context, Json, JsonRoute

router = APIRouter(route_class=JsonRoute, include_in_schema=False)

_files = StaticFiles(directory=Path(__file__).parents[1] / "playground")
_swagger = StaticFiles(directory=str(files("fastapi_offline") / "static"))
# Scripts, styles and requests are this service's own alone: what a title or a description holds
# can run nothing, whatever it looks like.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src 'self'"
)
_SWAGGER_POLICY = f"{_POLICY} data:; style-src-attr 'unsafe-inline'"  # its icons, its layout
_ELSEWHERE = " https: http:"  # where pictures of a catalogue are
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304 while the same
}


@router.get("/")
async def page(request: Request) -> Response:
    """The page."""
    return await _file("index.html", request)


@router.get("/playground/settings.json")
async def page_settings(context: Context) -> Response:
    """The settings of the page."""
    return Json({"fields": parse_page_fields(context.settings.page_fields)}, headers=_HEADERS)


@router.get("/playground/{name:path}")
async def file(name: str, request: Request) -> Response:
    """One of its files; the pages have addresses of their own."""
    if name.endswith(".html"):
        raise NotFound(f"no file {name!r}")
    return await _file(name, request)


async def _file(name: str, request: Request) -> Response:
    response = await _files.get_response(name, request.scope)
    settings: Settings = request.app.state.settings
    pictured = PICTURES in parse_page_fields(settings.page_fields)
    policy = _POLICY + _ELSEWHERE * pictured
    response.headers.update({**_HEADERS, "Content-Security-Policy": policy})
    return response


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Swagger UI, whose files ship in a package: it works without a network, too."""
    response = await _files.get_response("docs/index.html", request.scope)
    response.headers.update({**_HEADERS, "Content-Security-Policy": _SWAGGER_POLICY})
    return response


@router.get("/docs/{name}")
async def docs_file(name: str, request: Request) -> Response:
    """One of the files of Swagger UI."""
    response = await _swagger.get_response(name, request.scope)
    response.headers.update({**_HEADERS, "Content-Security-Policy": _SWAGGER_POLICY})
    return response
