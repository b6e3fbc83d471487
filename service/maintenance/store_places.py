"""Places of stores, as commands name them: data directories, files, and databases."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from service.domain.errors import Invalid, NotFound
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.timestamps import to_rfc3339
from service.runtime import data_layout
from service.runtime.data_layout import (
    STORE_FILE,
    check_namespace,
    check_restored,
    namespace_folder,
)
from service.runtime.durable_files import make_directory
from service.stores.base import Store
from service.stores.postgres.connections import Connections
from service.stores.postgres.namespaces import (
    find_or_create_namespace,
    namespace_ids,
    namespace_names,
    read_namespaces,
)
from service.stores.postgres.schema import open_installation
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.database_file import DatabaseFile
from service.stores.sqlite.store import SQLiteStore


class SQLitePlace:
    """A data directory, or the file of one store. Its methods are those of `PostgresPlace`."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._is_file = path.is_file() or (path.suffix == ".db" and not path.is_dir())
        # The file with the usual name stands for its directory.
        self._data = path.parent if self._is_file and path.name == STORE_FILE else path
        self._is_file = self._is_file and path.name != STORE_FILE

    def namespaces(self) -> list[str]:
        if self._is_file:
            return [DEFAULT_NAMESPACE]
        names = [DEFAULT_NAMESPACE, *data_layout.namespace_names(self._data)]
        return [name for name in names if self._path(name).exists()]

    def identity(self, namespace: str) -> str:
        path = self._path(namespace)
        if not path.is_file():
            raise NotFound(f"there is no store {path}")
        return f"sqlite:{path.resolve()}"

    def namespace_id(self, namespace: str) -> str | None:
        path = self._path(namespace)
        if not path.exists():
            return None
        is_default = namespace == DEFAULT_NAMESPACE
        return "" if is_default else data_layout.namespace_id(path.parent)

    def open(self, namespace: str, own_id: str | None = None, *, is_target: bool = False) -> Store:
        path = self._path(namespace)
        if self._is_file:
            return SQLiteStore(path, is_target=is_target)
        check_restored(self._data)
        if namespace != DEFAULT_NAMESPACE and not path.parent.is_dir():
            data_layout.create_namespace(
                self._data, namespace, lambda folder: _create_store(folder / STORE_FILE), own_id
            )
        make_directory(path.parent)
        return SQLiteStore(path, is_target=is_target)

    def _path(self, namespace: str) -> Path:
        if self._is_file:
            if namespace != DEFAULT_NAMESPACE:
                raise Invalid("", f"{self.name} is the file of one store; name its data directory")
            return self._data
        return namespace_folder(self._data, check_namespace(namespace)) / STORE_FILE


class PostgresPlace:
    """A database of PostgreSQL."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._connections = Connections(url)
        except Invalid:
            raise Invalid(
                "", f"{_without_password(url)!r} is no URL of PostgreSQL, postgresql://USER@HOST/DB"
            ) from None
        self.name = f"postgresql://{self._connections.name}"

    def namespaces(self) -> list[str]:
        """Return the names of the existing namespaces, `default` first."""
        with self._connections.plain() as connection:
            return namespace_names(connection)

    def identity(self, namespace: str) -> str:
        """Return what a copy records of the store of a namespace, to identify it later.

        Raises:
            NotFound: there is no such store.
        """
        created = self._read().get(check_namespace(namespace))
        if created is None:
            raise NotFound(f"there is no namespace {namespace!r} in {self.name}")
        # To the microsecond, which a database that is moved takes with it.
        return f"the namespace {namespace} of {to_rfc3339(created)} in PostgreSQL"

    def namespace_id(self, namespace: str) -> str | None:
        """Return the id of a namespace, which its keys have too; None without the namespace."""
        if check_namespace(namespace) not in self._read():
            return None
        with self._connections.plain() as connection:
            open_installation(connection)  # an earlier version has no ids
            return namespace_ids(connection).get(namespace)

    def open(self, namespace: str, own_id: str | None = None, *, is_target: bool = False) -> Store:
        """Open the store of a namespace; create a missing one with this id.

        Raises:
            Corrupt: it is an unfinished copy, and not opened as a target.
        """
        if own_id is not None:
            with self._connections.plain() as connection:
                open_installation(connection)
                find_or_create_namespace(connection, check_namespace(namespace), own_id)
        return PostgresStore(self._url, namespace=check_namespace(namespace), is_target=is_target)

    def _read(self) -> dict[str, int]:
        with self._connections.plain() as connection:
            return read_namespaces(connection)


StorePlace = SQLitePlace | PostgresPlace


def parse_place(text: str) -> StorePlace:
    """Return the place of a directory or file, `sqlite:` and either, or a `postgresql://` URL.

    Raises:
        Invalid: the text is none of these.
    """
    scheme, colon, rest = text.partition(":")
    if scheme in {"postgresql", "postgres"} and rest.startswith("//"):
        return PostgresPlace(text)
    path = rest if scheme == "sqlite" and colon else text
    if not path or "://" in path:
        raise Invalid(
            "", f"{_without_password(text)!r} is neither a data directory nor a postgresql:// URL"
        )
    return SQLitePlace(Path(path))


def _create_store(path: Path) -> None:
    DatabaseFile(path)  # which creates it


def _without_password(text: str) -> str:
    parts = urlsplit(text)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
