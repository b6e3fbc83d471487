"""Access: what a request may do, by its origin and its key, and the engine it is about."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain import keys
from service.domain.errors import HeedError, NotFound
from service.domain.keys import ApiKey, parse_token
from service.domain.names import DEFAULT_NAMESPACE, is_name
from service.domain.settings import Settings
from service.domain.timestamps import to_rfc3339
from service.engine.namespaces import Namespaces
from service.http.keys import is_exposed
from service.http.rate_limits import RateLimits
from service.http.scope_keys import ANONYMOUS, ENGINE, KEY, NAMESPACE, OPENING, ROW, SERVED
from service.stores.base import Store

# routes ---------------------------------------------------------------------------------

Scopes = frozenset[keys.Scope]


class Kind(Enum):
    """Decides which queue a request waits in, and whether it has a deadline."""

    QUESTION = "question"  # computes an answer that someone waits for
    LIGHT = "light"  # reads or writes single rows; waits for the disk more than it computes
    CATALOGUE = "catalogue"  # waits for the catalogue or a model to be served, without a deadline
    BULK = "bulk"  # many events at once
    IMPORT = "import"  # many items at once, without a deadline

    @property
    def is_urgent(self) -> bool:
        """True if an answer after the deadline is useless.

        An activation reads every byte of a model, and answers before it serves. Writes of items
        answer once the items are served: a bulk import waits, so that searches do not.
        """
        return self not in (Kind.CATALOGUE, Kind.IMPORT)


class RouteRow(NamedTuple):
    """Needs of a route: one of the scopes, which `admin` implies, and its place in a queue."""

    scopes: Scopes
    kind: Kind = Kind.LIGHT


PUBLIC: Scopes = frozenset()  # no key is needed
_READ: Scopes = frozenset({"read"})
_WRITE: Scopes = frozenset({"write"})
_TRAIN: Scopes = frozenset({"train"})
_WATCH: Scopes = frozenset({"read", "train"})  # the key that starts a training follows it
_METRICS: Scopes = frozenset({"metrics"})

# All routes but those of questions, which are in `routes.questions`.
ROUTES: Mapping[tuple[str, str], RouteRow] = {
    ("POST", "/v1/batch"): RouteRow(_READ, Kind.QUESTION),
    ("GET", "/v1/items"): RouteRow(_READ, Kind.QUESTION),
    ("POST", "/v1/items"): RouteRow(_WRITE, Kind.IMPORT),
    ("GET", "/v1/items/{item_id}"): RouteRow(_READ),
    ("PATCH", "/v1/items/{item_id}"): RouteRow(_WRITE, Kind.CATALOGUE),
    ("DELETE", "/v1/items/{item_id}"): RouteRow(_WRITE, Kind.CATALOGUE),
    ("POST", "/v1/events"): RouteRow(_WRITE, Kind.BULK),
    ("GET", "/v1/users"): RouteRow(_READ, Kind.QUESTION),
    ("GET", "/v1/users/{user_id}"): RouteRow(_READ),
    ("PUT", "/v1/users/{user_id}"): RouteRow(_WRITE),
    ("DELETE", "/v1/users/{user_id}"): RouteRow(_WRITE),
    ("GET", "/v1/users/{user_id}/history"): RouteRow(_READ, Kind.QUESTION),
    ("DELETE", "/v1/users/{user_id}/history/{event_id}"): RouteRow(_WRITE),
    ("POST", "/v1/users/{user_id}/merge"): RouteRow(_WRITE),
    ("GET", "/v1/scenarios"): RouteRow(_READ),
    ("GET", "/v1/scenarios/{name}"): RouteRow(_READ),
    ("GET", "/v1/scenarios/{name}/versions"): RouteRow(_READ),
    ("POST", "/v1/scenarios/{name}"): RouteRow(_READ, Kind.QUESTION),
    ("PUT", "/v1/scenarios/{name}"): RouteRow(_WRITE),
    ("DELETE", "/v1/scenarios/{name}"): RouteRow(_WRITE),
    ("POST", "/v1/models/train"): RouteRow(_TRAIN),
    ("POST", "/v1/models/{version}/activate"): RouteRow(_TRAIN, Kind.CATALOGUE),
    ("GET", "/v1/models"): RouteRow(_WATCH),
    ("GET", "/v1/jobs"): RouteRow(_WATCH),
    ("GET", "/v1/jobs/{job_id}"): RouteRow(_WATCH),
    ("POST", "/v1/jobs/{job_id}/cancel"): RouteRow(_TRAIN),
    ("GET", "/metrics"): RouteRow(_METRICS),
    ("GET", "/health/live"): RouteRow(PUBLIC),
    ("GET", "/health/ready"): RouteRow(PUBLIC),
    # Files of the page and of the documentation, which hold no data: the page asks for a key.
    ("GET", "/"): RouteRow(PUBLIC),
    ("GET", "/playground/settings.json"): RouteRow(PUBLIC),
    ("GET", "/playground/{name:path}"): RouteRow(PUBLIC),
    ("GET", "/docs"): RouteRow(PUBLIC),
    ("GET", "/docs/{name}"): RouteRow(PUBLIC),
    ("GET", "/openapi.json"): RouteRow(PUBLIC),
    ("HEAD", "/openapi.json"): RouteRow(PUBLIC),
}


class RouteTable:
    """The row of each request, by the patterns of the routes, in the order of the router.

    Raises:
        LookupError: a route has no row.
    """

    def __init__(
        self, routes: Iterable[BaseRoute], rows: Mapping[tuple[str, str], RouteRow]
    ) -> None:
        self._rows = rows
        self._patterns: dict[str, list[Route]] = {}
        self._exact: dict[tuple[str, str], Route | None] = {}
        for route in routes:
            if not isinstance(route, Route):
                raise LookupError(f"{route!r} has no row, since it has no path")
            for method in route.methods or ():
                if (method, route.path) not in rows:
                    raise LookupError(f"{method} {route.path} has no row in {__name__}.ROUTES")
                self._patterns.setdefault(method, []).append(route)
        # A path without parameters may still be caught by the pattern of an earlier route.
        for method, patterns in self._patterns.items():
            for route in patterns:
                if not route.param_convertors:
                    self._exact[method, route.path] = self._first(method, route.path)

    def of(self, method: str, path: str) -> RouteRow | None:
        """Return the row of a request; None if no route answers it."""
        route = self._find(method, path)
        return None if route is None else self._rows[method, route.path]

    def nearest(self, method: str, path: str) -> Route | None:
        """Return the route of a request; for a method that is not allowed, a route of its path."""
        others = (self._first(other, path) for other in self._patterns)
        return self._find(method, path) or next(filter(None, others), None)

    def _find(self, method: str, path: str) -> Route | None:
        return self._exact.get((method, path)) or self._first(method, path)

    def _first(self, method: str, path: str) -> Route | None:
        for route in self._patterns.get(method, ()):
            if route.path_regex.match(path):
                return route
        return None


# origins --------------------------------------------------------------------------------

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")  # a name or an address, and a port
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class OriginChecks:
    """Pure ASGI middleware: 421 for a host that is not allowed, 403 for a cross-site write.

    If the service listens on every address, any IP address is an allowed host: DNS rebinding
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
        if origin in self._origins:
            return False
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            return site not in (b"same-origin", b"none")
        return b"origin" in headers and origin.partition("://")[2] != host  # browsers send it

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


def _refusal(status: int, detail: str) -> HTTPException:
    return HTTPException(status, detail, headers={"Connection": "close"})  # its body is not read


# keys -----------------------------------------------------------------------------------

NAMESPACE_HEADER = "Heed-Namespace"  # of a request without a key; a key has its own namespace

_NAMESPACE = NAMESPACE_HEADER.lower().encode()
_PREFIX = "/v1/"
_SHOWN = 80  # characters of a wrong name
_REALM = 'Bearer realm="heed"'


class AccessControl:
    """Pure ASGI middleware: 401 without a valid key, 403 without a scope, 429 beyond a rate.

    It stands before the reading of bodies: a client without a key cannot make the service hold any.
    Routes that need no key take none into account but `/health/ready`, which says more to one.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, rates: RateLimits) -> None:
        self._app = app
        self._is_off = settings.keys == "off"
        # Bound to an address that others can reach, a service never answers without keys, whatever
        # becomes of its store.
        self._is_required = settings.keys == "required" or is_exposed(settings)
        self._rates = rates
        self._known: dict[str, ApiKey] = {}  # by id, as of one version
        self._version = -1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[KEY], scope[NAMESPACE], scope[ANONYMOUS] = None, DEFAULT_NAMESPACE, False
            table: RouteTable = scope["app"].state.route_table
            path = scope["path"].removeprefix(scope["root_path"])
            scope[ROW] = table.of(scope["method"], path)
            if self._is_off:
                _choose_namespace(scope)
            else:
                await self._check(scope)
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        state = scope["app"].state
        store: Store = state.namespaces.default.store
        row: RouteRow | None = scope[ROW]
        if row is not None and row.scopes == PUBLIC:
            await self._note(scope, store)
            return
        if not self._keys_are_on(store):
            _choose_namespace(scope)
            return
        key = await self._authenticate(scope, store)
        scope[KEY], scope[NAMESPACE] = key, key.namespace
        _note_namespace(scope)
        if (named := _named_namespace(scope)) not in (None, key.namespace):
            detail = f"The key {key.name} is for the namespace {key.namespace}, not for {named!r}."
            raise HTTPException(403, detail, headers=_closing(scope))
        if key.rate is not None:
            await self._rates.count(key, key.rate, store.rate_windows)
        if row is None:
            # Not left to the router: a route without scopes shall answer nobody.
            path = scope["path"].removeprefix(scope["root_path"])
            raise HTTPException(405 if state.route_table.nearest(scope["method"], path) else 404)
        if not key.permits(row.scopes):
            raise _forbidden(scope, key, " or ".join(sorted(row.scopes)))

    async def _note(self, scope: Scope, store: Store) -> None:
        """Note the key of a request that needs none; a wrong one is as none."""
        try:
            if not self._keys_are_on(store):
                _choose_namespace(scope)
            else:
                scope[ANONYMOUS] = True
                key = await self._authenticate(scope, store)
                scope[KEY], scope[NAMESPACE], scope[ANONYMOUS] = key, key.namespace, False
        except (HTTPException, HeedError):  # liveness does not depend on the store
            return

    def _keys_are_on(self, store: Store) -> bool:
        version = store.announced_keys()
        if version != self._version:
            self._known, self._version = {}, version
        return version > 0 or self._is_required

    async def _authenticate(self, scope: Scope, store: Store) -> ApiKey:
        """Return the valid key of a request. Raises HTTPException (401)."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            detail = "An API key is needed: send it as Authorization: Bearer KEY."
            raise _unauthorized(scope, detail)
        scheme, _, token = given[0].decode("latin-1").partition(" ")
        parsed = parse_token(token.strip()) if scheme.lower() == "bearer" else None
        if len(given) > 1 or scheme.lower() != "bearer":
            raise _unauthorized(scope, "Send one Authorization header, of the form Bearer KEY.")
        key = None if parsed is None else await self._find(store, parsed[0])
        if parsed is None or key is None or not key.matches(parsed[1]):
            raise _unauthorized(scope, "The API key is not known.", "invalid_token")
        if key.revoked is not None:
            raise _unauthorized(scope, f"The API key {key.name} is revoked.", "invalid_token")
        if key.is_expired(time.time_ns() // 1000):
            detail = f"The API key {key.name} expired at {to_rfc3339(key.expires or 0)}."
            raise _unauthorized(scope, detail, "invalid_token")
        if scope["app"].state.namespaces.is_another(key.namespace, key.namespace_id):
            detail = f"The namespace that the API key {key.name} was made for is removed."
            raise _unauthorized(scope, detail, "invalid_token")
        return key

    async def _find(self, store: Store, key_id: str) -> ApiKey | None:
        key = self._known.get(key_id)
        if key is None:
            key = await store.key(key_id)
            if key is not None:  # unknown ids are without number
                self._known[key_id] = key
        return key


def is_about_data(scope: Scope) -> bool:
    """Return True for a request under `/v1/`, which is about the data of a namespace."""
    path: str = scope["path"]
    return path.removeprefix(scope["root_path"]).startswith(_PREFIX)


def _named_namespace(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _NAMESPACE:
            return str(value, "latin-1")[:_SHOWN]
    return None


def _choose_namespace(scope: Scope) -> None:
    """Set the namespace of a request without a key. Raises HTTPException (404)."""
    name = _named_namespace(scope)
    if name is not None:
        if not is_name(name) and name != DEFAULT_NAMESPACE:
            raise HTTPException(404, f"There is no namespace {name!r}.", headers=_closing(scope))
        scope[NAMESPACE] = name
    _note_namespace(scope)


def _note_namespace(scope: Scope) -> None:
    """Count a request for its namespace from here on, even if it is refused later."""
    name = scope[NAMESPACE]
    if not is_about_data(scope):
        return
    if name == DEFAULT_NAMESPACE or scope["app"].state.namespaces.has_served(name):
        scope[SERVED] = name


def _unauthorized(scope: Scope, detail: str, error: str = "") -> HTTPException:
    challenge = f'{_REALM}, error="{error}"' if error else _REALM
    return HTTPException(401, detail, headers=_headers(scope, challenge))


def _forbidden(scope: Scope, key: ApiKey, needed: str) -> HTTPException:
    held = ", ".join(sorted(key.scopes))
    detail = f"This needs a key with the scope {needed}; the key {key.name} has {held}."
    challenge = f'{_REALM}, error="insufficient_scope", scope="{needed.replace(" or ", " ")}"'
    return HTTPException(403, detail, headers=_headers(scope, challenge))


def _headers(scope: Scope, challenge: str) -> dict[str, str]:
    return {"WWW-Authenticate": challenge, **_closing(scope)}


def _closing(scope: Scope) -> dict[str, str]:
    """Return the header that ends the connection of a request whose body is not read."""
    return {} if scope["method"] in _SAFE_METHODS else {"Connection": "close"}


# engines --------------------------------------------------------------------------------


def namespace_of(scope: Scope) -> str:
    name: str = scope.get(NAMESPACE, DEFAULT_NAMESPACE)
    return name


class Engines:
    """Pure ASGI middleware, inside `Admission`: keeps the engine of a request open meanwhile.

    Only requests under `/v1/` need one. The deadline of a request bounds its wait for an engine to
    be opened.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises `NotFound` and `Unavailable`, as `Namespaces.lease` does."""
        if scope["type"] != "http" or not is_about_data(scope):
            await self._app(scope, receive, send)
            return
        namespaces: Namespaces = scope["app"].state.namespaces
        name = namespace_of(scope)
        if name == DEFAULT_NAMESPACE:
            scope[ENGINE] = namespaces.default
            await self._app(scope, receive, send)
            return
        try:
            key: ApiKey | None = scope.get(KEY)
            scope[OPENING] = name
            async with namespaces.lease(name, None if key is None else key.namespace_id) as engine:
                del scope[OPENING]
                scope[SERVED], scope[ENGINE] = name, engine
                await self._app(scope, receive, send)
        except NotFound:
            if ENGINE not in scope:  # an unknown namespace has no series
                scope.pop(SERVED, None)
            raise
        except BaseException:
            scope[SERVED] = name  # it exists, and could not be opened, or not in time
            raise
