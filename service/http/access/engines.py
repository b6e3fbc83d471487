"""The engine that a request is about, as pure ASGI middleware: that of its namespace."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain.errors import NotFound
from service.domain.keys import ApiKey
from service.domain.names import DEFAULT_NAMESPACE
from service.engine.namespaces import Namespaces
from service.http.access.access_control import KEY, NAMESPACE, is_about_data
from service.http.telemetry.metrics import SERVED

OPENING = "heed.opening"  # in the scope while a request waits for this namespace to be opened
ENGINE = "heed.engine"  # in the scope of every request under /v1/


def namespace_of(scope: Scope) -> str:
    """Return the name of the namespace that a request is about."""
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
