"""Scopes of the routes: one table, which names every route of the service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.routing import BaseRoute, Route

from service.domain.keys import Scope

Scopes = frozenset[Scope]

PUBLIC: Scopes = frozenset()  # no key is needed
_READ: Scopes = frozenset({"read"})
_WRITE: Scopes = frozenset({"write"})
_TRAIN: Scopes = frozenset({"train"})
_WATCH: Scopes = frozenset({"read", "train"})  # whoever starts a training follows it
_METRICS: Scopes = frozenset({"metrics"})

# Of all routes but those of questions. One of the scopes suffices, and `admin` implies all.
ROUTES: Mapping[tuple[str, str], Scopes] = {
    ("POST", "/v1/batch"): _READ,
    ("GET", "/v1/items"): _READ,
    ("POST", "/v1/items"): _WRITE,
    ("GET", "/v1/items/{item_id}"): _READ,
    ("PATCH", "/v1/items/{item_id}"): _WRITE,
    ("DELETE", "/v1/items/{item_id}"): _WRITE,
    ("POST", "/v1/events"): _WRITE,
    ("GET", "/v1/users"): _READ,
    ("GET", "/v1/users/{user_id}"): _READ,
    ("PUT", "/v1/users/{user_id}"): _WRITE,
    ("DELETE", "/v1/users/{user_id}"): _WRITE,
    ("GET", "/v1/users/{user_id}/history"): _READ,
    ("DELETE", "/v1/users/{user_id}/history/{event_id}"): _WRITE,
    ("POST", "/v1/users/{user_id}/merge"): _WRITE,
    ("GET", "/v1/scenarios"): _READ,
    ("GET", "/v1/scenarios/{name}"): _READ,
    ("GET", "/v1/scenarios/{name}/versions"): _READ,
    ("POST", "/v1/scenarios/{name}"): _READ,
    ("PUT", "/v1/scenarios/{name}"): _WRITE,
    ("DELETE", "/v1/scenarios/{name}"): _WRITE,
    ("POST", "/v1/models/train"): _TRAIN,
    ("POST", "/v1/models/{version}/activate"): _TRAIN,
    ("GET", "/v1/models"): _WATCH,
    ("GET", "/v1/jobs"): _WATCH,
    ("GET", "/v1/jobs/{job_id}"): _WATCH,
    ("POST", "/v1/jobs/{job_id}/cancel"): _TRAIN,
    ("GET", "/metrics"): _METRICS,
    ("GET", "/health/live"): PUBLIC,
    ("GET", "/health/ready"): PUBLIC,
    # Files of the page and of the documentation, which hold no data: the page asks for a key.
    ("GET", "/"): PUBLIC,
    ("GET", "/playground/settings.json"): PUBLIC,
    ("GET", "/playground/{name:path}"): PUBLIC,
    ("GET", "/docs"): PUBLIC,
    ("GET", "/docs/{name}"): PUBLIC,
    ("GET", "/openapi.json"): PUBLIC,
    ("HEAD", "/openapi.json"): PUBLIC,
}


class RouteScopes:
    """The scopes of each request, by the patterns of the routes themselves.

    Args:
        routes: in the order in which the router tries them.
        scopes: of each, by method and path.

    Raises:
        LookupError: a route has no scopes.
    """

    def __init__(
        self, routes: Iterable[BaseRoute], scopes: Mapping[tuple[str, str], Scopes]
    ) -> None:
        self._scopes = scopes
        self._patterns: dict[str, list[Route]] = {}
        self._exact: dict[tuple[str, str], Route | None] = {}
        for route in routes:
            if not isinstance(route, Route):
                raise LookupError(f"{route!r} has no scopes, since it has no path")
            for method in route.methods or ():
                if (method, route.path) not in scopes:
                    raise LookupError(f"{method} {route.path} has no scopes in {__name__}.ROUTES")
                self._patterns.setdefault(method, []).append(route)
        # A path without parameters may still be caught by the pattern of an earlier route.
        for method, patterns in self._patterns.items():
            for route in patterns:
                if not route.param_convertors:
                    self._exact[method, route.path] = self._first(method, route.path)

    def of(self, method: str, path: str) -> Scopes | None:
        """Return the scopes of which a request needs one; None where no route answers it."""
        route = self._find(method, path)
        return None if route is None else self._scopes[method, route.path]

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
