"""The OpenAPI document: FastAPI's own, with what holds for every route said once, here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from service.http.access import RouteRow, Scopes
from service.http.problems import MEDIA_TYPE, Problem, documented

DESCRIPTION = """\
A memory is a set of (key, value) rows, and a query attends over it: a user's history, the
catalogue, or rows that you bring.

**Ids** are 1 to 256 bytes of UTF-8 without NUL and come back byte for byte; in a path they are
percent-encoded, a slash as `%2F`. **Timestamps** are RFC 3339 with an offset; they come back in UTC
with microseconds. **Numbers** are finite JSON numbers, and vectors hold none above 1e12 in size.
**Lists** are paged by an opaque `cursor`. **Errors** are `application/problem+json` (RFC 9457);
those of validation name each offending field by a JSON pointer. Every answer carries
`X-Request-ID` (yours, if you sent one) and `Server-Timing`. **Keys**, where the installation has
any, are sent as `Authorization: Bearer KEY`; each operation names the scopes of which a key needs
one, and `admin` implies all. A key is for one **namespace**; without keys a request is about
`default`, or about the namespace that the header `Heed-Namespace` names.
"""

TAGS = [
    {"name": "items", "description": "The catalogue."},
    {"name": "events", "description": "What users did."},
    {"name": "users", "description": "Profiles, histories, forgetting."},
    {"name": "ask", "description": "Score, recommend, search."},
    {"name": "scenarios", "description": "Saved questions."},
    {"name": "attend", "description": "The bare operator."},
    {"name": "models", "description": "Training and versions."},
    {"name": "run", "description": "Health and metrics."},
]

_HEADERS = {
    "X-Request-ID": {
        "description": "Names this request in answers and logs.",
        "schema": {"type": "string"},
    },
    "Server-Timing": {
        "description": "Milliseconds for each stage of the work.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds after which to try again.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "WWW-Authenticate": {
        "description": "How to authenticate (RFC 6750).",
        "schema": {"type": "string"},
    },
}
# By status: the title and the detail of a problem, as an example.
_PROBLEMS = {
    401: ("Unauthorized", "An API key is needed: send it as Authorization: Bearer KEY."),
    403: ("Forbidden", "This needs a key with the scope write; the key shop has read."),
    404: ("Not Found", "no item 'talk-8' in the catalogue"),
    408: ("Request Timeout", "The body took longer than 20 s to arrive (HEED_BODY_TIMEOUT)."),
    409: ("Conflict", "a training is running"),
    413: ("Too Large", "The body is larger than 1048576 bytes (HEED_MAX_BODY_BYTES)."),
    415: ("Unsupported Media Type", "Content-Encoding may be gzip, not br."),
    421: ("Misdirected Request", "The host shop.example.org is not one of HEED_ALLOWED_HOSTS."),
    422: (
        "Invalid",
        "/events/3/weight: must be above 0 (got 0); leave out an event that counts for nothing",
    ),
    429: ("Overloaded", "too many requests in flight (HEED_MAX_IN_FLIGHT)"),
    500: ("Internal Server Error", "An unexpected error; the log has it under this request_id."),
    503: ("Deadline Exceeded", "Not done within 10 s (HEED_DEADLINE)."),
    507: ("Store Full", "The disk is full: reads go on, and writes once there is room."),
}
_SCHEME = {"type": "http", "scheme": "bearer", "description": "An API key."}
_ALWAYS = ("X-Request-ID", "Server-Timing")
_DESCRIBING = frozenset({"title", "description", "examples", "default"})
_RETRY = frozenset({429, 503, 507})


def describe(
    app: FastAPI, rows: Mapping[tuple[str, str], RouteRow]
) -> Callable[[], dict[str, Any]]:
    """Return a replacement of `app.openapi` that completes FastAPI's document, once."""
    plain = app.openapi
    return cache(lambda: _completed(plain(), rows))


def _completed(
    document: dict[str, Any], rows: Mapping[tuple[str, str], RouteRow]
) -> dict[str, Any]:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    ours = models_json_schema(
        [(Problem, "serialization")], ref_template="#/components/schemas/{model}"
    )[1]
    schemas.update(ours["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, never answered
        schemas.pop(name, None)
    components["headers"] = _HEADERS
    components["securitySchemes"] = {"key": _SCHEME}
    problems: dict[str, Any] = {}
    components["responses"] = problems
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(operation, problems, method, rows[method.upper(), path].scopes)
    _declare_members(document)
    return document


def _declare_members(document: dict[str, Any]) -> None:
    """Declare members for generators of clients, which read `default` in different ways.

    TypeScript's makes a member with a default required, and Python's sends the default, also where
    Heed distinguishes it from a member that is left out. So defaults are said in descriptions. A
    member of an answer that is not required is left out, and is never null; in a body, null stands
    for a member that is left out.
    """
    schemas = document["components"]["schemas"]
    bodies = [
        operation.get("requestBody")
        for operations in document["paths"].values()
        for operation in operations.values()
    ]
    asked = set(_referred(bodies, schemas))
    for name, schema in schemas.items():
        required = schema.get("required", ())
        for member, declared in schema.get("properties", {}).items():
            if name not in asked and member not in required:
                _put_last(declared)
            elif name in asked and member not in required:
                _add_null(declared)
    for node in _objects(document):
        for member in node.get("properties", {}).values():
            _describe_default(member)
        for parameter in node.get("parameters", ()):
            _describe_default(parameter["schema"], parameter)


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yield each JSON object of a document."""
    if isinstance(node, dict):
        yield node
    for inner in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from _objects(inner)


def _referred(node: Any, schemas: dict[str, Any]) -> set[str]:
    """Return the names of the schemas that a part of the document refers to, at any depth."""
    found, waiting = set[str](), [node]
    while waiting:
        for each in _objects(waiting.pop()):
            name = str(each.get("$ref", "")).rpartition("/")[2]
            if name in schemas and name not in found:
                found.add(name)
                waiting.append(schemas[name])
    return found


def _put_last(member: dict[str, Any]) -> None:
    """Drop null from the type of a member, and put a single type behind its description."""
    kinds = [kind for kind in member.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) > 1:
        member["anyOf"] = kinds
        return
    types = {key: member.pop(key) for key in [*member] if key not in _DESCRIBING}
    alone = kinds[0] if kinds else types
    member |= {key: value for key, value in alone.items() if key not in member}


def _add_null(member: dict[str, Any]) -> None:
    """Let a member be null too, beside a kind of its own."""
    about: dict[str, Any] = {
        key: member.pop(key) for key in ("title", "description", "default") if key in member
    }
    kinds = member.pop("anyOf") if "anyOf" in member else [dict(member)] if member else []
    member.clear()
    member |= about
    if kinds:
        member["anyOf"] = [*kinds, *[{"type": "null"}] * ({"type": "null"} not in kinds)]


def _describe_default(schema: dict[str, Any], described: dict[str, Any] | None = None) -> None:
    """Move the default of a member, or of a parameter, into its description.

    An empty or structured default is not said: leaving the member out restricts nothing.
    """
    default = schema.pop("default", None)
    if default not in (None, "") and not isinstance(default, list | dict):
        described = schema if described is None else described
        said = f"By default `{json.dumps(default)}`."
        described["description"] = f"{described.get('description', '')} {said}".strip()


def _complete(
    operation: dict[str, Any], problems: dict[str, Any], method: str, scopes: Scopes
) -> None:
    """Add the scopes, the problems that a route may answer, and the headers of every answer.

    Each problem is described once, in `problems`, and referred to by its status.
    """
    statuses = [421, 429, 500, 503]
    # Each of the alternatives suffices; the first is no key, for installations without keys.
    # Swagger UI shows it beside the path: a sentence says more than the name of a function.
    operation["summary"] = " ".join(operation["description"].partition("\n\n")[0].split())
    operation["security"] = [{}, *({"key": [scope]} for scope in sorted(scopes))]
    if scopes:
        statuses += [401]
    if scopes or method != "get":
        statuses += [403]
    if "parameters" in operation:
        statuses += [422]
    if "requestBody" in operation:
        statuses += [408, 413, 415, 422]
        operation["requestBody"]["required"] = True  # of what may be empty, its media type
    responses = operation["responses"]
    responses.pop("422", None)
    statuses += [int(status) for status in responses if status >= "400"]
    for status, response in documented(*statuses).items():
        retry = ("Retry-After",) if status in _RETRY else ()
        challenge = ("WWW-Authenticate",) if status == 401 else ()
        response["content"][MEDIA_TYPE]["example"] = _example(int(status))
        problems[str(status)] = {**response, "headers": _headers(*_ALWAYS, *retry, *challenge)}
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    for status, response in responses.items():
        if status < "400":
            response["headers"] = _headers(*_ALWAYS)
    operation["responses"] = dict(sorted(responses.items()))


def _example(status: int) -> dict[str, Any]:
    """Return the body of a problem as the service answers it."""
    title, detail = _PROBLEMS[status]
    body = {
        "type": f"urn:heed:problem:{title.lower().replace(' ', '-')}",
        "title": title,
        "status": status,
        "detail": detail,
        "request_id": "446d391f261e43119de4c64ce183c822",
    }
    if status == 422:
        pointer, _, why = detail.partition(": ")
        body["errors"] = [{"in": "body", "pointer": pointer, "detail": why}]
    return body


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
