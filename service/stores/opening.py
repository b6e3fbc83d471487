"""Opening of a namespace's store, by the setting that says where the truth is kept."""

from __future__ import annotations

from pathlib import Path

from service.domain.names import DEFAULT_NAMESPACE
from service.runtime.data_layout import STORE_FILE, namespace_of
from service.stores.base import Store
from service.stores.postgres.connections import QUICK_TIMEOUT
from service.stores.postgres.store import PostgresStore
from service.stores.quota import StoreQuota
from service.stores.sqlite.store import SQLiteStore

_POSTGRES = ("postgresql://", "postgres://")


def is_shared(url: str) -> bool:
    """Report whether the store of a URL is shared by several machines."""
    return url.startswith(_POSTGRES)


def open_store(
    folder: Path,
    url: str = "",
    *,
    quota: StoreQuota | None = None,
    patience: float = QUICK_TIMEOUT,
) -> Store:
    """Open the store of a namespace.

    Args:
        folder: the data directory of the namespace.
        url: of the PostgreSQL database that holds all namespaces; without one, or as `sqlite:`, the
            store is a file in the folder.
        quota: bounds what this client may add to the store.
        patience: seconds that a request waits for a database.

    Raises:
        NotFound: the database has no such namespace.
        Corrupt: the file fails its checks.
        Incompatible: a newer version of Heed wrote the store.
        Unavailable: the database does not answer.
    """
    if not is_shared(url):
        return SQLiteStore(folder / STORE_FILE, quota=quota)
    name = namespace_of(folder)
    return PostgresStore(
        url, namespace=name, create=name == DEFAULT_NAMESPACE, quota=quota, patience=patience
    )
