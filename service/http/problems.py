"""Every failure as `application/problem+json` (RFC 9457), from one table of the domain's errors.

Bodies carry what the caller can act on and the request's id; tracebacks go to the log under the
same id. For bad input, `errors` names each offending field by its JSON pointer (RFC 6901).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.domain import errors
from service.domain.keys import ApiKey
from service.domain.names import DEFAULT_NAMESPACE
from service.http.limits import connection_of, lingering
from service.http.scope_keys import DISCONNECTED, KEY, METHOD, NAMESPACE, REQUEST_ID
from service.runtime.data_layout import without_folders

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 20  # a batch may be wrong in every line; naming twenty of them is enough

_log = logging.getLogger(__name__)

# The status of each domain error; an error not named here takes its parent's.
STATUS: Mapping[type[errors.HeedError], int] = {
    errors.HeedError: 500,
    errors.Invalid: 422,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.ModelRejected: 409,
    errors.TooLarge: 413,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 503,
    errors.Overloaded: 429,
    errors.RateLimited: 429,
    errors.StoreFull: 507,
    errors.QuotaExceeded: 507,
    errors.Corrupt: 500,
    errors.Incompatible: 500,
}

_CAUSE = "The service's log has the cause under this request_id."

_PLAINER = {
    "missing": "is required",
    "extra_forbidden": "is not a field here; check its spelling, or see /docs",
    "model_attributes_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "list_type": "must be a JSON array",
    "string_type": "must be a string",
    "string_unicode": "must be valid UTF-8",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
}

_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_SHOWN = 50  # characters of a value that is wrong
# Errors whose value says nothing: of another member, too long, or no text.
_UNSHOWN = {"missing", "extra_forbidden", "string_too_long", "string_unicode"}


def problem(
    scope: Scope,
    status: int,
    title: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    **extensions: Any,
) -> Response:
    """A problem response. `title` names the kind, and with dashes it is the end of `type`."""
    body = {
        "type": f"urn:heed:problem:{title.lower().replace(' ', '-')}",
        "title": title,
        "status": status,
        "detail": _printable(detail),
        "request_id": scope.get(REQUEST_ID, ""),
        **extensions,
    }
    return Response(orjson.dumps(body), status, headers, MEDIA_TYPE)


def answer(scope: Scope, error: Exception, **extensions: Any) -> Response:
    """The problem response for any exception; an unexpected one is logged and not described."""
    if _is_of_removed(scope, error):
        _log.info("request %s: its namespace was removed: %s", scope.get(REQUEST_ID, ""), error)
        error = errors.NotFound("the namespace was removed")
    scope["app"].state.metrics.count_error(
        type(error).__name__ if _is_known(error) else "Unexpected"
    )
    if isinstance(error, errors.HeedError):
        return _domain(scope, error, **extensions)
    if isinstance(error, RequestValidationError):
        found = error.errors()
        return _invalid(scope, located(found), len(found))
    if isinstance(error, HTTPException):
        return _http(scope, error, **extensions)
    request_id = scope.get(REQUEST_ID, "")
    _log.error("request %s failed", request_id, exc_info=error)
    detail = "An unexpected error; the service's log has it under this request_id."
    return problem(scope, 500, "Internal Server Error", detail, **extensions)


def _is_of_removed(scope: Scope, error: Exception) -> bool:
    """Report whether a request failed because its namespace was removed."""
    if _is_known(error) and (not isinstance(error, errors.HeedError) or _status(error) < 500):
        return False
    key: ApiKey | None = scope.get(KEY)
    name = scope.get(NAMESPACE, DEFAULT_NAMESPACE)
    namespaces = scope["app"].state.namespaces
    try:
        return bool(namespaces.is_gone(name, None if key is None else key.namespace_id))
    except (errors.HeedError, OSError):  # cannot tell
        return False


def _is_known(error: Exception) -> bool:
    """True for the types of errors of the domain and of HTTP, whose names are few."""
    return isinstance(error, (errors.HeedError, RequestValidationError, HTTPException))


async def handle(request: Request, error: Exception) -> Response:
    """`answer` as FastAPI's exception handlers are called."""
    return answer(request.scope, error)


class Problems:
    """Pure ASGI middleware: whatever is raised inside becomes a problem response.

    Once an answer has begun, nothing but cutting the connection can say that it failed, so then
    the error goes on to the server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            scope[DISCONNECTED] = True  # no client is left to answer
        except Exception as error:
            if begun:
                raise
            reply = send
            if isinstance(error, errors.TooLarge):
                reply = lingering(receive, send, connection_of(scope))
            await answer(scope, error)(scope, receive, reply)


# ------------------------------------------------------------------------- documentation


class FieldError(BaseModel):
    """One field that broke a rule."""

    part: str = Field(alias="in", examples=["body"], description="body, query or path.")
    pointer: str = Field(examples=["/events/3/weight"], description="A JSON pointer (RFC 6901).")
    detail: str = Field(examples=["must be greater than 0"])


class Problem(BaseModel):
    """What went wrong (RFC 9457)."""

    type: str = Field(examples=["urn:heed:problem:invalid"], description="The kind, for programs.")
    title: str = Field(examples=["Invalid"], description="The kind, for people.")
    status: int = Field(examples=[422])
    detail: str = Field(examples=["/events/3/weight: must be greater than 0"])
    request_id: str = Field(description="The one of `X-Request-ID`; the log knows it.")
    errors: list[FieldError] | None = Field(None, description="Of a 422: the offending fields.")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these problems."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in statuses
    }


# --------------------------------------------------------------------------- translation


def _kind(error: errors.HeedError) -> type[errors.HeedError]:
    return next(kind for kind in type(error).__mro__ if kind in STATUS)


def _status(error: errors.HeedError) -> int:
    return STATUS[_kind(error)]


def _domain(scope: Scope, error: errors.HeedError, **extensions: Any) -> Response:
    kind, status = _kind(error), _status(error)
    if isinstance(error, errors.Invalid):
        part = "query" if scope["method"] == "GET" else "body"
        field = {"in": part, "pointer": error.pointer, "detail": error.detail}
        return _invalid(scope, [field])
    headers = {}
    if isinstance(error, errors.Unavailable):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, (errors.TooLarge, errors.Crowded)):
        headers["Connection"] = "close"  # the rest of the body is not worth reading
    detail = error.told if error.public is None else f"{error.told} {_CAUSE}"
    if isinstance(error, errors.ModelRejected):  # may name files
        detail = without_folders(detail, scope["app"].state.settings.data)
    if status >= 500 or detail != error.detail:
        _log.warning("request %s: %s: %s", scope.get(REQUEST_ID, ""), kind.__name__, error.detail)
    title = "".join(f" {c}" if c.isupper() else c for c in kind.__name__).strip()
    return problem(scope, status, title, detail, headers=headers, **extensions)


def _invalid(scope: Scope, fields: list[dict[str, str]], total: int = 1) -> Response:
    return problem(scope, 422, "Invalid", sentence(fields, total), errors=fields)


def sentence(fields: list[dict[str, str]], total: int) -> str:
    """What `located` found among `total` errors, as one sentence about the first of them."""
    first = fields[0]
    where = first["pointer"] or f"the {first['in']}"
    more = f" (and {total - 1} more)" if total > 1 else ""
    return f"{where}: {first['detail']}{more}"


def _http(scope: Scope, error: HTTPException, **extensions: Any) -> Response:
    title = HTTPStatus(error.status_code).phrase
    headers = dict(error.headers or {})
    detail = str(error.detail)
    if error.status_code == 404 and detail == title:
        detail = f"There is nothing at {scope['method']} {scope['path']}."
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed(scope))
        method = scope.get(METHOD, scope["method"])
        detail = f"{scope['path']} does not take {method}; it takes {headers['Allow']}."
    return problem(scope, error.status_code, title, detail, headers=headers, **extensions)


def _allowed(scope: Scope) -> list[str]:
    # A router that finds the path under several routes knows only the first one's methods.
    same = {key: scope[key] for key in ("type", "path", "root_path", "headers") if key in scope}
    routes = scope["app"].router.routes
    taken = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**same, "method": method})[0] is Match.FULL for route in routes)
    ]
    return ["GET", "HEAD", *taken[1:]] if "GET" in taken else taken


def located(found: Iterable[Mapping[str, Any]], where: str = "") -> list[dict[str, str]]:
    """The first of pydantic's errors as `{in, pointer, detail}`, one for each pointer.

    `where` is the part of the request that was validated; without it, the first step of each
    error's path says so, as FastAPI has it.
    """
    fields: dict[tuple[str, str], dict[str, str]] = {}
    for error in found:
        path = list(error["loc"])
        part = where or str(path.pop(0))
        if error["type"] == "json_invalid":
            position = path.pop()
            detail = f"is not JSON: {error['ctx']['error']} (at character {position})"
        else:
            detail = _plain(error)
        if path and path[-1] == "[key]":  # pydantic's word for a wrong name in an object
            path.pop()
        pointer = "".join(f"/{_escaped(str(step))}" for step in path)
        inner = error.get("ctx", {}).get("error")
        if isinstance(inner, errors.Invalid):  # raised by a rule of the records, inside a field
            pointer, detail = pointer + inner.pointer, inner.detail
        fields.setdefault((part, pointer), {"in": part, "pointer": pointer, "detail": detail})
        if len(fields) == MAX_ERRORS:
            break  # a megabyte can hold a hundred thousand of them
    return list(fields.values())


def _plain(error: Mapping[str, Any]) -> str:
    kind, value = error["type"], error.get("input")
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    message = _PLAINER.get(kind, message.replace("input should", "must"))
    if kind in _BOUNDS:
        return message + f", not {value}"[:_SHOWN]
    if kind in _UNSHOWN or not (value is None or isinstance(value, str | int | float)):
        return message
    shown = repr(value[:_SHOWN]) if isinstance(value, str) else json.dumps(value)[:_SHOWN]
    return f"{message} (got {shown})"


def _escaped(step: str) -> str:
    return _printable(step).replace("~", "~0").replace("/", "~1")


def _printable(text: str) -> str:
    # JSON cannot hold the surrogates of a path that was not UTF-8, and a path may be very long.
    return text[:2000].encode(errors="replace").decode()
