"""A service with namespaces for tests, chosen by their header."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import orjson
from fastapi import FastAPI

from service.domain.settings import Settings
from service.engine.namespaces import Namespaces
from service.http import app
from service.http.access import NAMESPACE_HEADER
from service.runtime.data_layout import STORE_FILE, create_namespace
from service.stores.sqlite.store import SQLiteStore


class NamespacedService:
    """An app with its engines, asked about one namespace or another. It must be closed.

    The deadline is long unless the settings name it.
    """

    def __init__(self, runner: asyncio.Runner, data: Path, **settings: Any) -> None:
        self.runner = runner
        self.app: FastAPI = app.create_app(Settings(data=data, **{"deadline": 60, **settings}))
        self._lifespan = self.app.router.lifespan_context(self.app)
        runner.run(self._lifespan.__aenter__())
        transport = httpx.ASGITransport(self.app)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    @property
    def namespaces(self) -> Namespaces:
        found: Namespaces = self.app.state.namespaces
        return found

    def close(self) -> None:
        self.runner.run(self._http.aclose())
        self.runner.run(self._lifespan.__aexit__(None, None, None))

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        namespace: str = "default",
        *,
        kind: str = "application/json",
    ) -> httpx.Response:
        """Send a request, with a body of JSON or of text."""
        return self.runner.run(self.send(method, path, body, namespace, kind=kind))

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        namespace: str = "default",
        *,
        kind: str = "application/json",
    ) -> httpx.Response:
        """Send a request from a coroutine of the same event loop."""
        content = body if body is None or isinstance(body, str) else orjson.dumps(body)
        headers = {"content-type": kind, NAMESPACE_HEADER: namespace}
        return await self._http.request(method, path, content=content, headers=headers)


def copy_namespace(source: Path, data: Path, name: str) -> Path:
    """Create a namespace with the content of another data directory; return its folder."""
    return create_namespace(data, name, lambda new: _copy(source, new))


def empty_namespace(data: Path, name: str) -> Path:
    """Create a namespace with an empty store; return its folder."""

    def fill(new: Path) -> None:
        asyncio.run(SQLiteStore(new / STORE_FILE).close())

    return create_namespace(data, name, fill)


def _copy(source: Path, new: Path) -> None:
    shutil.copytree(source, new, dirs_exist_ok=True)
