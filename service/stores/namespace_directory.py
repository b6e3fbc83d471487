"""Namespaces of an installation, wherever its stores are: found by name, created and removed.

Each has a data directory on every machine. With embedded stores the directory is the namespace;
with a database its rows are, and a machine's directory holds what it has made or fetched of it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import orjson

from service.domain.errors import Conflict, Corrupt, Invalid, NotFound
from service.domain.names import DEFAULT_NAMESPACE, is_name
from service.runtime import data_layout, durable_files
from service.runtime.data_layout import (
    STORE_FILE,
    StoreToken,
    check_namespace,
    namespace_folder,
    namespaces_locked,
    store_token,
)
from service.stores.opening import is_shared
from service.stores.postgres import namespaces
from service.stores.postgres.notices import open_database
from service.stores.postgres.schema import open_installation
from service.stores.sqlite.store import SQLiteStore

_TRIES, _PAUSE = 5, 0.1  # of a removal; seconds between them
_OWNER_FILE = "namespace.json"  # says which namespace of the database a directory was made for


class NamespaceDirectory(Protocol):
    """Namespaces of an installation; `default` is none of them, since it always exists."""

    def token(self, name: str) -> StoreToken | None:
        """Return the identity of a namespace's store, None without one. Waits for nothing.

        Another namespace of the same name, created later, has another identity.
        """
        ...

    def namespace_id(self, name: str) -> str | None:
        """Return the id of a namespace, even if its store is missing; None without the namespace.

        Waits for nothing.
        """
        ...

    def exists(self, name: str) -> bool:
        """Report whether there is a namespace of this name, also where its store is missing."""
        return self.namespace_id(name) is not None

    def names(self) -> list[str]:
        """Return the names of all namespaces, sorted."""
        ...

    def held(self, name: str, token: StoreToken | None) -> AbstractContextManager[Path]:
        """Keep a namespace from being removed on this machine, and yield its data directory.

        Raises:
            NotFound: it was removed, or created again since it had this token.
            Corrupt: its store is missing.
        """
        ...

    def create(self, name: str) -> Path:
        """Create a namespace; return its data directory. Raises `Invalid` or `Conflict`."""
        ...

    def find(self, name: str) -> Path:
        """Return the data directory of a namespace, `default` included. Raises `NotFound`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a namespace with all that it has stored, and revoke its keys.

        Raises `Invalid` for `default`, `NotFound`, and `Conflict` while a training runs in it.
        """
        ...

    def forget(self, name: str) -> None:
        """Remove this machine's files of a namespace that another machine removed. Blocks."""
        ...

    def close(self) -> None:
        """Release all resources. Blocks."""
        ...


def open_directory(data: Path, url: str) -> NamespaceDirectory:
    """Open the namespaces of an installation: of a data directory, or of a database.

    Raises:
        Unavailable: the database does not answer.
    """
    return DatabaseNamespaces(data, url) if is_shared(url) else FolderNamespaces(data)


class FolderNamespaces(NamespaceDirectory):
    """Namespaces that are folders of the data directory, each with a store of its own."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def token(self, name: str) -> StoreToken | None:
        return store_token(namespace_folder(self._data, name))

    def namespace_id(self, name: str) -> str | None:
        folder = namespace_folder(self._data, name)
        own_id = data_layout.namespace_id(folder)
        return own_id if own_id or folder.is_dir() else None

    def names(self) -> list[str]:
        return data_layout.namespace_names(self._data)

    @contextmanager
    def held(self, name: str, token: StoreToken | None) -> Iterator[Path]:
        folder = namespace_folder(self._data, name)
        with namespaces_locked(self._data):
            found = store_token(folder)
            if found is None and folder.is_dir():
                raise Corrupt(f"{folder / STORE_FILE} is missing")
            if found is None or found != token:
                raise NotFound(f"there is no namespace {name!r}")
            yield folder

    def create(self, name: str) -> Path:
        def fill(folder: Path) -> None:
            asyncio.run(SQLiteStore(folder / STORE_FILE).close())

        return data_layout.create_namespace(self._data, name, fill)

    def find(self, name: str) -> Path:
        return data_layout.find_namespace(self._data, name)

    def remove(self, name: str) -> None:
        store = self._data / STORE_FILE
        revoke = partial(_revoke_keys, store, name) if store.exists() else lambda: None
        _once_free(partial(data_layout.remove_namespace, self._data, name, revoke))

    def forget(self, name: str) -> None:  # noqa: ARG002 - its folder was the namespace
        return

    def close(self) -> None:
        return


class DatabaseNamespaces(NamespaceDirectory):
    """Namespaces of a database, with a folder on this machine for each that it serves."""

    def __init__(self, data: Path, url: str) -> None:
        self._data = data
        self._database = open_database(url)
        try:
            with self._database.connections.plain() as connection:
                open_installation(connection)
        except BaseException:
            self._database.abandon()
            raise

    def token(self, name: str) -> StoreToken | None:
        found = self._database.notices.namespaces().get(name)
        return None if found is None else (found.namespace_no, found.created, found.namespace_id)

    def namespace_id(self, name: str) -> str | None:
        found = self._database.notices.namespaces().get(name)
        return None if found is None else found.namespace_id

    def names(self) -> list[str]:
        found = self._database.notices.namespaces()
        return sorted(name for name in found if is_name(name) and name != DEFAULT_NAMESPACE)

    @contextmanager
    def held(self, name: str, token: StoreToken | None) -> Iterator[Path]:
        with namespaces_locked(self._data):
            found = self._read(name)
            if found is None or found != token:
                raise NotFound(f"there is no namespace {name!r}")
            yield self._own_folder(name, found)

    def create(self, name: str) -> Path:
        check_namespace(name)
        with self._database.connections.plain() as connection:
            namespaces.create_namespace(connection, name)
        return self.find(name)

    def find(self, name: str) -> Path:
        if name == DEFAULT_NAMESPACE:
            return self._data
        found = self._read(name) if is_name(name) else None
        if found is None:
            raise NotFound(
                f"there is no namespace {name!r}: heed namespaces create {name} creates it"
            )
        with namespaces_locked(self._data):
            return self._own_folder(name, found)

    def remove(self, name: str) -> None:
        if name == DEFAULT_NAMESPACE:
            raise Invalid("", f"{name} is the whole installation's, and cannot be removed")
        check_namespace(name)
        with self._database.connections.plain() as connection:
            _once_free(partial(namespaces.remove_namespace, connection, name))
        self.forget(name)

    def forget(self, name: str) -> None:
        with namespaces_locked(self._data):
            if self._read(name) is None:  # else a later namespace has the folder, or empties it
                shutil.rmtree(namespace_folder(self._data, name), ignore_errors=True)

    def close(self) -> None:
        self._database.abandon()

    def _read(self, name: str) -> StoreToken | None:
        """Read a namespace's identity as it is now."""
        with self._database.connections.plain() as connection:
            row = connection.execute(
                "SELECT namespace_no, created, namespace_id FROM heed.namespaces WHERE name = %s",
                (name,),
            ).fetchone()
        return None if row is None else (int(row[0]), int(row[1]), str(row[2]))

    def _own_folder(self, name: str, token: StoreToken) -> Path:
        """Return the folder of a namespace, emptied where it was made for an earlier one."""
        folder = namespace_folder(self._data, name)
        owner, written = orjson.dumps(token[:2]), folder / _OWNER_FILE
        if not written.exists() or written.read_bytes() != owner:
            shutil.rmtree(folder, ignore_errors=True)
            durable_files.make_directory(folder)
            durable_files.replace(written, owner)
        return folder


def _once_free(remove: Callable[[], None]) -> None:
    """Remove a namespace; try again while marking its interrupted trainings holds their lock."""
    for _ in range(_TRIES):
        with suppress(Conflict):
            remove()
            return
        time.sleep(_PAUSE)
    remove()


def _revoke_keys(path: Path, name: str) -> None:
    """Revoke the keys of a namespace, which are in the store of `default`."""

    async def revoke() -> None:
        store = SQLiteStore(path)
        try:
            for key in await store.keys():
                if key.namespace == name:
                    await store.revoke_key(key.key_id)
        finally:
            await store.close()

    asyncio.run(revoke())
