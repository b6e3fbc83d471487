"""Keys that the service keeps in files, and the address that needs one."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from rich.console import Console

from service.domain.errors import HeedError, Invalid
from service.domain.keys import issue_key, parse_token
from service.domain.settings import PREFIX, Settings, is_loopback
from service.runtime.data_layout import FIRST_KEY_FILE
from service.runtime.durable_files import make_directory, sync_directory, write
from service.stores.base import Store
from service.stores.opening import open_store


def is_exposed(settings: Settings) -> bool:
    """Report whether other machines can reach the service, and `insecure` does not allow that.

    A host name other than `localhost` may resolve to anything, so it counts as exposed.
    """
    return not settings.insecure and not is_loopback(settings.host)


def check_bind_address(settings: Settings, *, has_keys: bool) -> None:
    """Check that an exposed service requires API keys.

    Raises:
        Invalid: naming what makes the address safe, and the setting that allows it.
    """
    if not is_exposed(settings) or settings.keys == "required":
        return
    if has_keys and settings.keys == "auto":
        return
    off = f"{PREFIX}KEYS is off" if settings.keys == "off" else "there is no API key"
    raise Invalid(
        "",
        f"refusing to bind {settings.host or 'every address'}: {off}, and other machines could "
        "read and write everything. Create a key with heed keys create or heed serve --first-key, "
        f"bind 127.0.0.1, or set {PREFIX}INSECURE=true if the network is protected by other means.",
    )


async def _create_first_key(store: Store, data: Path) -> None:
    """Create a key with the scope `admin` if there never was any key.

    Its token is written to a file of the data directory that only its owner can read. Logs are
    kept and shipped elsewhere; the file is not.
    """
    if await store.keys_version():
        return
    key, token = issue_key("first", frozenset({"admin"}), time.time_ns() // 1000)
    path = data / FIRST_KEY_FILE
    make_directory(data)
    # The file first: a key whose token nobody has would lock everybody out.
    _write_token(path, token, 0o600)
    await store.add_key(key)


_NAME = "metrics-file"
_MODE = 0o640  # Prometheus runs as another user, and reads it as a member of the group


async def _keep_metrics_key(store: Store, path: Path) -> None:
    """Keep the token of a valid key with the scope `metrics` in a file.

    A file that holds one is left as it is. Otherwise a new key is created, and those that were
    created for such a file before are revoked. While the store has no other key nothing is done:
    the first key would lock out every client that has none.

    Raises:
        OSError: the file cannot be written.
    """
    if not await store.keys_version():
        return
    if (parsed := _read_token(path)) is not None and (
        held := await store.key(parsed[0])
    ) is not None:
        is_valid = held.revoked is None and held.matches(parsed[1])
        if is_valid and held.permits(frozenset({"metrics"})):
            return
    key, token = issue_key(_NAME, frozenset({"metrics"}), time.time_ns() // 1000)
    _write_token(path, token, _MODE)
    earlier = [each.key_id for each in await store.keys() if each.name == _NAME]
    await store.add_key(key)
    for key_id in earlier:
        await store.revoke_key(key_id)


def _read_token(path: Path) -> tuple[str, str] | None:
    try:
        return parse_token(path.read_text("ascii").strip())
    except (OSError, UnicodeDecodeError):
        return None


def _write_token(path: Path, token: str, mode: int) -> None:
    path.unlink(missing_ok=True)  # an existing file would keep its mode
    write(path, f"{token}\n".encode(), mode=mode)
    path.chmod(mode)  # whatever the umask
    sync_directory(path.parent)


_log = logging.getLogger(__name__)


def prepare_keys(settings: Settings, console: Console, *, with_first_key: bool) -> None:
    """Create the keys that the service keeps in files, and check that an exposed one has keys.

    `with_first_key` gives an installation that never had an API key one of an administrator.

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
    store, path = open_store(settings.data, settings.store), settings.metrics_key_file
    try:
        if with_first_key:
            await _create_first_key(store, settings.data)
        if path:
            try:
                await _keep_metrics_key(store, Path(path))
            except (OSError, HeedError) as error:  # without it the service still answers
                _log.warning(
                    "%sMETRICS_KEY_FILE: no key could be kept in %s: %s", PREFIX, path, error
                )
        return await store.keys_version() > 0
    finally:
        await store.close()
