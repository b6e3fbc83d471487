"""Stores opened for a few calls in the process of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from service.stores.base import Store

S = TypeVar("S", bound=Store)


def run_on(store: S, *calls: Callable[[S], Awaitable[Any]]) -> list[Any]:
    """Return the results of calls, made one after the other on a store that is then closed."""

    async def run() -> list[Any]:
        try:
            return [await call(store) for call in calls]
        finally:
            await store.close()

    return asyncio.run(run())
