"""Derived files: made of the store once, cached on disk, and shared between machines.

A file is named by what it was made of, so that none is ever stale. All of this is an effort to save
time: where it fails, a machine makes its own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.catalogue.catalogue import (
    FORMAT,
    PARTS,
    Catalogue,
    catalogue_from_parts,
    catalogue_to_parts,
)
from service import __version__
from service.domain.errors import Conflict, Corrupt, HeedError
from service.runtime.cache_files import CacheFiles
from service.stores.base import Store
from service.stores.postgres.shared_files import CHUNK_BYTES, SharedFiles
from service.stores.values import CatalogueDigest

SHARED_BYTES = 2 << 30  # of each kind in the database; the oldest files go first
INDEXES, CATALOGUES = "index", "catalogue"  # kinds

_log = logging.getLogger(__name__)

_PATIENCE = 600.0  # seconds to wait for another machine that makes the same file
_FILE = "content"


def open_cache_files(folder: Path, most: int, store: Store | None, kind: str) -> CacheFiles:
    """Open the `most` files of a folder, which are shared where the store is.

    `kind` is that of the files in the database: INDEXES or CATALOGUES.
    """
    shared = None if store is None else store.shared
    if shared is None:
        return CacheFiles(folder, most)
    return SharedCacheFiles(folder, most, shared.files(kind))


class SharedCacheFiles(CacheFiles):
    """Files of a folder, fetched from a database if they were made already.

    The checksum of a file goes with it, so that damage on the way is found as damage on the disk.
    """

    def __init__(self, folder: Path, most: int, shared: SharedFiles) -> None:
        super().__init__(folder, most)
        self._shared = shared

    def read(self, key: str) -> NDArray[np.uint8] | None:
        """Return the bytes of a key, from this disk or else from the database."""
        data = super().read(key)
        return self._fetched(key) if data is None else data

    def write(self, key: str, data: NDArray[np.uint8]) -> None:
        """Keep bytes under a key, on this disk and in the database."""
        super().write(key, data)
        if data.nbytes > SHARED_BYTES:
            return
        try:
            chunks = ((_FILE, part) for part in self.content(key, CHUNK_BYTES))
            self._shared.put(key, b"", chunks)
            self._shared.trim(SHARED_BYTES)
        except Conflict:
            return  # another machine has made it too
        except (HeedError, OSError) as error:
            _log.warning("%s is not shared with other machines: %s", key, error)

    def building(self, key: str) -> AbstractContextManager[None]:
        """Enter before the bytes of a key are made; other machines wait for them."""
        return self._shared.making(key, _PATIENCE)

    def _fetched(self, key: str) -> NDArray[np.uint8] | None:
        try:
            stored = self._shared.find(key)
            if stored is None:
                return None
            with closing(self._shared.read(key)) as chunks:
                self.put(key, (data for _, data in chunks))
            data = super().read(key)
            if data is None:
                raise Corrupt("its checksum does not match its content")
        except Corrupt as error:
            _log.warning("%s is damaged in the database, and is made again: %s", key, error)
            self._drop(key)
            return None
        except (HeedError, OSError) as error:
            _log.warning("%s is not fetched: %s", key, error)
            return None
        _log.info("fetched %s, %s bytes", key, f"{stored.size:,}")
        return data

    def _drop(self, key: str) -> None:
        try:
            self._shared.drop(key)
        except HeedError as error:
            _log.warning("%s stays in the database: %s", key, error)


class CatalogueCache:
    """The state of the last catalogue that was read from a store.

    It is named by the digest of the stored items and of all else that it was computed from, such as
    the `keyword_fields`, attributes that hold identifiers. If several machines share the store, one
    reads and the others fetch.
    """

    def __init__(
        self,
        folder: Path,
        encoder: str,
        keyword_fields: Sequence[str],
        *,
        store: Store | None = None,
    ) -> None:
        self._files = open_cache_files(folder, len(PARTS), store, CATALOGUES)
        self._made_by = (FORMAT, __version__, encoder, tuple(keyword_fields))

    def read(self, empty: Catalogue, items: CatalogueDigest) -> Catalogue | None:
        """Return the catalogue of all stored items; None if it is missing or damaged.

        The vocabulary and the BM25 writer of the `empty` one are filled.
        """
        key, parts = self._key(empty, items), {}
        for part in PARTS:
            data = self._files.read(f"{key}-{part}")
            if data is None:
                return None
            parts[part] = data
        return catalogue_from_parts(empty, parts)

    def write(self, catalogue: Catalogue, items: CatalogueDigest) -> None:
        """Keep a catalogue whose BM25 writer recorded all that it holds, in place of the last."""
        key = self._key(catalogue, items)
        for part, data in catalogue_to_parts(catalogue).items():
            self._files.write(f"{key}-{part}", data)

    def _key(self, catalogue: Catalogue, items: CatalogueDigest) -> str:
        made_of = (*self._made_by, catalogue.dimension, items.version, items.digest)
        return hashlib.sha256(repr(made_of).encode()).hexdigest()
