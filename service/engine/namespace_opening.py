"""Opening of a namespace's engine, which shares what is costly with the engine of `default`."""

from __future__ import annotations

import asyncio

from service.domain.settings import Settings
from service.engine.compose import Parts, compose
from service.engine.engine import Engine
from service.runtime.data_layout import StoreToken
from service.runtime.threads import ExecutorShare
from service.stores.namespace_directory import NamespaceDirectory


async def open_namespace(
    settings: Settings,
    directory: NamespaceDirectory,
    name: str,
    token: StoreToken | None,
    shared: Parts,
) -> Engine:
    """Open the engine of a namespace, with its files read on other threads than the event loop's.

    Args:
        settings: of the service.
        directory: of the namespaces.
        name: of the namespace, checked.
        token: of the store that is to be opened.
        shared: parts of `default`, which lend their text encoder and executor.

    Raises:
        NotFound: the namespace was removed, or created anew.
        Corrupt: naming the file that is missing or fails its checks.
        ModelRejected: the current model does not fit this service.
        Unavailable: the namespaces stay locked by another process.
    """
    composing = asyncio.create_task(
        asyncio.to_thread(compose_engine, settings, directory, name, token, shared)
    )
    try:
        engine = await asyncio.shield(composing)
    except asyncio.CancelledError:
        # A thread cannot be interrupted, and what it has opened must be closed.
        await (await composing).close()
        raise
    try:
        await engine.open()
    except BaseException:
        await engine.close()
        raise
    return engine


def compose_engine(
    settings: Settings,
    directory: NamespaceDirectory,
    name: str,
    token: StoreToken | None,
    shared: Parts,
) -> Engine:
    """Wire an engine. This creates files that are missing, so that removals wait for it."""
    with directory.held(name, token) as folder:
        parts = compose(
            settings.model_copy(update={"data": folder}),
            encoder=shared.embeddings.encoder,
            executor=ExecutorShare(shared.executor),
        )
        return Engine(parts)
