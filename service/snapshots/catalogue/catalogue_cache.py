"""Catalogues as they were read from the store, in checksummed files named by what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from models.catalogue.catalogue import Catalogue
from models.catalogue.catalogue_state import (
    FORMAT,
    PARTS,
    catalogue_from_parts,
    catalogue_to_parts,
)
from service import __version__
from service.snapshots.shared_cache import CATALOGUES, open_cache_files
from service.stores.base import Store
from service.stores.values import CatalogueDigest


class CatalogueCache:
    """The state of the last catalogue that was read from a store.

    It is named by the digest of the stored items and of all else that it was computed from, so that
    none is ever stale.

    Args:
        folder: of the files.
        encoder: the name of the text encoder.
        keyword_fields: attributes that hold identifiers.
        store: of the items; where several machines share it, one reads and the others fetch.
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
        """Return the catalogue of these items; None where there is none, or it is damaged.

        Args:
            empty: a catalogue without items, whose vocabulary and BM25 writer are filled.
            items: all that is stored.
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
