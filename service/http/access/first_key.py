"""The first key: an administrator's, for an installation that has none."""

from __future__ import annotations

import time
from pathlib import Path

from service.domain.keys import issue_key
from service.runtime.data_layout import FIRST_KEY_FILE
from service.runtime.durable_files import make_directory, sync_directory, write
from service.stores.base import Store


async def create_first_key(store: Store, data: Path) -> bool:
    """Create a key with the scope `admin` if there never was any key; report whether it did.

    Its token is written to a file of the data directory that its owner alone can read. Logs are
    kept and shipped elsewhere; the file is not.
    """
    if await store.keys_version():
        return False
    key, token = issue_key("first", frozenset({"admin"}), time.time_ns() // 1000)
    path = data / FIRST_KEY_FILE
    make_directory(data)
    path.unlink(missing_ok=True)  # an existing file would keep its mode
    # The file first: a key whose token nobody has would lock everybody out.
    write(path, f"{token}\n".encode(), mode=0o600)
    sync_directory(data)
    await store.add_key(key)
    return True
