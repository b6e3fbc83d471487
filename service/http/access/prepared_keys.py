"""API keys at start-up: what must exist before the service binds its address."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from rich.console import Console

from service.domain.errors import HeedError
from service.domain.settings import PREFIX, Settings
from service.http.access.bind_address import check_bind_address, is_exposed
from service.http.access.first_key import create_first_key
from service.http.access.metrics_key import keep_metrics_key
from service.runtime.data_layout import FIRST_KEY_FILE
from service.stores.base import Store
from service.stores.opening import open_store

_log = logging.getLogger(__name__)


def prepare_keys(settings: Settings, console: Console, *, with_first_key: bool) -> None:
    """Create the keys that the service keeps in files, and check that an exposed one has keys.

    Args:
        settings: of the service.
        console: prints where the first key is.
        with_first_key: give an installation that never had an API key an administrator's.

    Raises:
        Invalid: the address would be open to other machines.
    """
    # On loopback, and wherever the settings alone decide, no store is opened for it.
    unsure = is_exposed(settings) and settings.keys == "auto"
    wanted = with_first_key or unsure or bool(settings.metrics_key_file)
    has_keys = wanted and asyncio.run(_prepare(settings, with_first_key=with_first_key))
    check_bind_address(settings, has_keys=has_keys)
    first = settings.data / FIRST_KEY_FILE
    if with_first_key and first.exists():
        console.print(
            f"The first API key, which has all scopes, is in {first}; see it with\n"
            f"  cat {first}          (of a container: docker compose exec api cat {first})\n"
            "Create narrower ones with heed keys create, and delete the file once it is noted.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


async def _prepare(settings: Settings, *, with_first_key: bool) -> bool:
    """Create the keys, and report whether there are any."""
    store = open_store(settings.data, settings.store)
    try:
        if with_first_key:
            await create_first_key(store, settings.data)
        await _keep_metrics_key(store, settings)
        return await store.keys_version() > 0
    finally:
        await store.close()


async def _keep_metrics_key(store: Store, settings: Settings) -> None:
    """Keep the key for Prometheus, without which the service still answers its clients."""
    path = settings.metrics_key_file
    if not path:
        return
    try:
        await keep_metrics_key(store, Path(path))
    except (OSError, HeedError) as error:
        _log.warning("%sMETRICS_KEY_FILE: no key could be kept in %s: %s", PREFIX, path, error)
