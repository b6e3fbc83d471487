"""The ASGI application: middleware and routes around the engines of the namespaces."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from service import __version__
from service.domain.settings import Settings, unknown_variables
from service.engine.engine import Engine, open_engine
from service.engine.namespaces import Namespaces
from service.http import openapi
from service.http.access import (
    NAMESPACE_HEADER,
    ROUTES,
    AccessControl,
    Engines,
    Kind,
    OriginChecks,
    RouteRow,
    RouteTable,
)
from service.http.limits import Admission, Arrivals, Bodies, HeadRequests, Paths
from service.http.problems import Problems, handle
from service.http.rate_limits import RateLimits
from service.http.routes import batch, page, questions, records, running, scenarios
from service.http.routes.context import PlainQuestions
from service.http.telemetry import Metrics, Telemetry

_log = logging.getLogger(__name__)

# The most frequent come first: routes are tried one after the other.
ROUTERS = (
    questions.ask_router,
    records.events_router,
    questions.attend_router,
    questions.ready_router,
    scenarios.router,
    batch.router,
    records.items_router,
    questions.similar_router,
    records.users_router,
    running.models_router,
    running.health_router,
    page.router,
)


def create_app(
    settings: Settings | None = None,
    *,
    engine: Engine | None = None,
    rates: RateLimits | None = None,
) -> FastAPI:
    """Return the service as an ASGI app, which closes its engines when it stops.

    Without settings they are read from the environment, as `uvicorn --factory` needs it; without
    an engine, that of the namespace `default` is opened from the settings when the app starts.
    `rates` counts the requests of API keys; workers share the one from before the fork.

    Raises:
        Invalid: a setting in the environment is wrong.
        LookupError: a route is missing from the table of scopes.
    """
    if settings is None:
        settings = Settings.read()
        for sentence in unknown_variables(os.environ):
            _log.warning("%s", sentence)
    metrics = Metrics()
    arrivals = Arrivals(settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if engine is None:
            app.state.namespaces = Namespaces(settings, await open_engine(settings))
        namespaces: Namespaces = app.state.namespaces
        namespaces.on_remove(metrics.forget_namespace)
        namespaces.begin()
        try:
            yield
        finally:
            await namespaces.close()

    app = FastAPI(
        title="Heed",
        version=__version__,
        description=openapi.DESCRIPTION,
        openapi_tags=openapi.TAGS,
        # `Telemetry` exports requests, without paths and messages, which carry ids.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        docs_url=None,  # in `routes.page`, without the CDN of FastAPI's own
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,  # names of methods in clients
        redirect_slashes=False,  # a path that ends in a slash has an empty id, which is no id
        lifespan=lifespan,
        middleware=[  # the first is the outermost
            Middleware(Paths),
            Middleware(Telemetry, metrics=metrics, logged=settings.access_log),
            *_cors(settings),
            Middleware(Problems),
            Middleware(HeadRequests),
            Middleware(OriginChecks, settings=settings),
            Middleware(AccessControl, settings=settings, rates=rates or RateLimits()),
            Middleware(Bodies, settings=settings, arrivals=arrivals),
            Middleware(Admission, settings=settings, metrics=metrics),
            Middleware(Engines),
            Middleware(PlainQuestions, questions=questions.QUESTIONS),
        ],
        exception_handlers={HTTPException: handle, RequestValidationError: handle},
    )
    if engine is not None:
        app.state.namespaces = Namespaces(settings, engine)
    app.state.settings = settings
    app.state.metrics = metrics
    app.state.arrivals = arrivals
    app.state.peers = None
    own = [route for route in app.routes if isinstance(route, Route)]  # FastAPI's: /openapi.json
    for router in ROUTERS:
        app.include_router(router)
    asked = {
        (row.method, row.path): RouteRow(frozenset({row.scope}), Kind.QUESTION)
        for row in questions.QUESTIONS
    }
    rows = {**ROUTES, **asked}
    app.state.route_table = RouteTable(
        [*own, *(route for router in ROUTERS for route in router.routes)], rows
    )
    app.openapi = openapi.describe(app, rows)  # type: ignore[method-assign]  # FastAPI's documented way
    return app


def _cors(settings: Settings) -> list[Middleware]:
    """Return the middleware that lets pages of the allowed origins in, if there are any.

    It stands outside of `Problems`, so that these pages can read errors too. Keys are no
    credentials of the browser's, which are not allowed.
    """
    if not settings.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=("Authorization", "Content-Type", NAMESPACE_HEADER, "X-Request-ID"),
            expose_headers=("Retry-After", "Server-Timing", "WWW-Authenticate", "X-Request-ID"),
        )
    ]
