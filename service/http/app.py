"""The ASGI application: middleware and routes around one engine."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from service import __version__
from service.domain.settings import Settings, unknown_variables
from service.engine.engine import Engine, open_engine
from service.http import openapi
from service.http.clients.head_requests import HeadRequests
from service.http.limits import Admission, Bodies, Paths
from service.http.origin_checks import OriginChecks
from service.http.problems import Problems, handle
from service.http.routes import (
    ask,
    attend,
    batch,
    events,
    health,
    items,
    models,
    page,
    ready,
    scenarios,
    users,
)
from service.http.telemetry import Metrics, Telemetry

_log = logging.getLogger(__name__)


def create_app(settings: Settings | None = None, *, engine: Engine | None = None) -> FastAPI:
    """Return the service as an ASGI app, which closes its engine when it stops.

    Without settings they are read from the environment, as `uvicorn --factory` needs it; without
    an engine it is opened from the settings when the app starts.

    Raises:
        Invalid: a setting in the environment is wrong.
    """
    if settings is None:
        settings = Settings.read()
        for sentence in unknown_variables(os.environ):
            _log.warning("%s", sentence)
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if engine is None:
            app.state.engine = await open_engine(settings)
        app.state.engine.observe_errors(metrics.observe_error)
        try:
            yield
        finally:
            await app.state.engine.close()

    app = FastAPI(
        title="Heed",
        version=__version__,
        description=openapi.DESCRIPTION,
        openapi_tags=openapi.TAGS,
        docs_url=None,  # in `routes.page`, without the CDN of FastAPI's own
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,  # names of methods in clients
        redirect_slashes=False,  # a path that ends in a slash has an empty id, which is no id
        lifespan=lifespan,
        middleware=[  # the first is the outermost
            Middleware(Telemetry, metrics=metrics),
            Middleware(Problems),
            Middleware(HeadRequests),
            Middleware(OriginChecks, settings=settings),
            Middleware(Paths),
            Middleware(Bodies, settings=settings),
            Middleware(Admission, settings=settings),
        ],
        exception_handlers={HTTPException: handle, RequestValidationError: handle},
    )
    app.state.engine = engine
    app.state.settings = settings
    app.state.metrics = metrics
    app.state.peers = None
    # What is asked most comes first: routes are tried one after the other.
    for module in (
        ask,
        events,
        attend,
        ready,
        scenarios,
        batch,
        items,
        users,
        models,
        health,
        page,
    ):
        app.include_router(module.router)
    app.openapi = openapi.describe(app)  # type: ignore[method-assign]  # FastAPI's documented way
    return app
