"""Access control by API keys: who sends a request, for which namespace, and whether it may.

Keys are required as soon as the store has ever had one. A change of keys, also by another process,
holds from the next request on: each request reads the version of the keys from the store, and
records are cached for one version.
"""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain.errors import HeedError
from service.domain.keys import ApiKey, parse_token
from service.domain.names import DEFAULT_NAMESPACE, is_name
from service.domain.settings import Settings
from service.domain.timestamps import to_rfc3339
from service.http.access.bind_address import is_exposed
from service.http.access.rate_limits import RateLimits
from service.http.access.route_scopes import PUBLIC, RouteScopes
from service.http.telemetry.metrics import SERVED
from service.stores.base import Store

KEY = "heed.key"  # in the scope of every request: its `ApiKey`, or None without one
NAMESPACE = "heed.namespace"  # in the scope of every request: the namespace that it is about
ANONYMOUS = "heed.anonymous"  # in the scope of every request: keys are on, and it has none

NAMESPACE_HEADER = "Heed-Namespace"  # of a request without a key; a key has its own namespace

_PREFIX = "/v1/"
_SHOWN = 80  # characters of a wrong name
_REALM = 'Bearer realm="heed"'
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AccessControl:
    """Pure ASGI middleware: 401 without a valid key, 403 without a scope, 429 beyond a rate.

    It stands before the reading of bodies, so that nobody without a key can make the service hold
    any. Routes that need no key take none into account but `/health/ready`, which says more to one.
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
        """Serve one request."""
        if scope["type"] == "http":
            scope[KEY], scope[NAMESPACE], scope[ANONYMOUS] = None, DEFAULT_NAMESPACE, False
            if self._is_off:
                _choose_namespace(scope)
            else:
                await self._check(scope)
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        state = scope["app"].state
        store: Store = state.namespaces.default.store
        routes: RouteScopes = state.route_scopes
        path = scope["path"].removeprefix(scope["root_path"])
        needed = routes.of(scope["method"], path)
        if needed == PUBLIC:
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
        if needed is None:
            # Not left to the router: a route without scopes shall answer nobody.
            raise HTTPException(405 if routes.nearest(scope["method"], path) else 404)
        if not key.permits(needed):
            raise _forbidden(scope, key, " or ".join(sorted(needed)))

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
    """Return the namespace that the header of a request names, if it has one."""
    name = Headers(scope=scope).get(NAMESPACE_HEADER)
    return None if name is None else name[:_SHOWN]


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
    if is_about_data(scope) and scope["app"].state.namespaces.has_served(name):
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
