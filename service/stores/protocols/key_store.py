"""Protocol of the store of API keys, which every `Store` includes.

Keys of all namespaces are in the store of the default namespace.
"""

from __future__ import annotations

from typing import Protocol

from service.domain.keys import ApiKey
from service.stores.protocols.rate_windows import RateWindows


class KeyStore(Protocol):
    """Records of API keys. None is ever deleted."""

    rate_windows: RateWindows | None = None
    """Counts the requests of keys for all machines; None in a store of one machine."""

    async def add_key(self, key: ApiKey) -> None:
        """Store a new key, and return once it is durable. Raises `Conflict` if its id is taken."""
        ...

    async def revoke_key(self, key_id: str) -> bool:
        """Revoke a key from now on; False if there is none, or it is revoked already."""
        ...

    async def key(self, key_id: str) -> ApiKey | None:
        """Return the key, revoked and expired ones too; None if unknown. Cheap."""
        ...

    async def keys(self) -> list[ApiKey]:
        """Return all keys, oldest first."""
        ...

    async def keys_version(self) -> int:
        """Return the version of the last change of a key; 0 if there never was one."""
        ...

    def announced_keys(self) -> int:
        """Return a version of the keys that requests must see, without waiting for anything.

        It is that of this client's last acknowledged change or a later one, and that of another
        client's change within a second.
        """
        ...
