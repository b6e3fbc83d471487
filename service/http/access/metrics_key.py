"""The metrics key: an API key for a Prometheus beside the service, kept in a file."""

from __future__ import annotations

import time
from pathlib import Path

from service.domain.keys import issue_key, parse_token
from service.runtime.durable_files import sync_directory, write
from service.stores.base import Store

_NAME = "metrics-file"
_MODE = 0o640  # Prometheus runs as another user, and reads it as a member of the group


async def keep_metrics_key(store: Store, path: Path) -> None:
    """Keep the token of a valid key with the scope `metrics` in a file.

    A file that holds one is left as it is. Otherwise a new key is created, and those that were
    created for such a file before are revoked. While the store has no other key nothing is done:
    the first key would lock out every client that has none.

    Raises:
        OSError: the file cannot be written.
    """
    if not await store.keys_version() or await _is_valid(store, path):
        return
    key, token = issue_key(_NAME, frozenset({"metrics"}), time.time_ns() // 1000)
    _write_token(path, token)
    earlier = [each.key_id for each in await store.keys() if each.name == _NAME]
    await store.add_key(key)
    for key_id in earlier:
        await store.revoke_key(key_id)


async def _is_valid(store: Store, path: Path) -> bool:
    """Report whether a file holds the token of a key that is not revoked."""
    parsed = _read_token(path)
    key = None if parsed is None else await store.key(parsed[0])
    return (
        parsed is not None
        and key is not None
        and key.revoked is None
        and key.matches(parsed[1])
        and key.permits(frozenset({"metrics"}))
    )


def _read_token(path: Path) -> tuple[str, str] | None:
    """Return the id and the secret of a file's token; None where there is none."""
    try:
        return parse_token(path.read_text("ascii").strip())
    except (OSError, UnicodeDecodeError):
        return None


def _write_token(path: Path, token: str) -> None:
    """Replace a file, whose mode may be another, by one that holds the token."""
    path.unlink(missing_ok=True)
    write(path, f"{token}\n".encode(), mode=_MODE)
    path.chmod(_MODE)  # whatever the umask
    sync_directory(path.parent)
