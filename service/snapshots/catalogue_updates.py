"""Changes of the store's items applied to the catalogue, with embeddings of the items' texts."""

from __future__ import annotations

import logging
import threading
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import ItemEntry
from models.text.terms import normalize_keyword, plain_text
from service.domain.records import ATTRIBUTES, Item
from service.domain.settings import KEYWORD_FIELDS
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.values import CatalogueChanges

# Items share the names of their attributes.
_normal_name = lru_cache(maxsize=4_096)(normalize_keyword)
_FIELDS = ("title", "description", "tags", "categories")


def to_entry(
    item: Item, dimension: int, keyword_fields: Sequence[str] = KEYWORD_FIELDS
) -> ItemEntry:
    """Convert an item to an entry of the catalogue.

    An embedding of another dimension belongs to another encoder, and is left out. Keywords are the
    item's id and the attributes named by `keyword_fields`, whatever the case and the separators of
    their names; `NAME.MEMBER` names a member of an object.
    """
    embedding = item.embedding
    if embedding is not None and len(embedding) != dimension:
        embedding = None
    labels = ", ".join(item.tags), ", ".join(item.categories)
    texts = [searched_text(text) for text in (item.title, item.description, *labels)]
    wanted = frozenset(map(_normal_name, keyword_fields))
    return ItemEntry(
        item_id=item.item_id,
        title=plain_text(item.title),
        fields={name: text for name, text in zip(_FIELDS, texts, strict=True) if text},
        categories=item.categories,
        attributes=item.attributes,
        embedding=embedding,
        hidden=item.hidden,
        published_at=item.published_at,
        tags=item.tags,
        keywords={"item_id": [item.item_id], **dict(_keywords(item.attributes, wanted))},
    )


def searched_text(text: str) -> str:
    """Return a text as its words and its meaning are taken from: without markup, in NFKC."""
    return unicodedata.normalize("NFKC", plain_text(text))


def _keywords(
    members: Mapping[str, Any], wanted: frozenset[str], path: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """Iterate over the names of wanted attributes, and their values as strings."""
    for name, value in members.items():
        if isinstance(value, Mapping):
            yield from _keywords(value, wanted, f"{path}{name}.")
        elif _normal_name(path + name) in wanted:
            values = value if isinstance(value, list | tuple) else [value]
            yield ATTRIBUTES + path + name, [text for each in values if (text := _written(each))]


def _written(value: object) -> str:
    """Return a string or a number as it is typed; empty for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value)


_log = logging.getLogger(__name__)

_IMMEDIATE_TEXTS = 32  # texts that even a slow encoder encodes while a refresh waits
_DEFERRED_ITEMS = 8  # items that a slow encoder encodes between two refreshes
_LOG_INTERVAL = 10.0  # seconds of encoding after which the log says how far it is


class CatalogueUpdates:
    """Applies changes to catalogues; defers what a slow text encoder needs long for.

    Deferred items are in the catalogue at once, found by their words and by the texts that were
    encoded before; their other texts become keys with `apply_encoded`.
    """

    def __init__(
        self, embeddings: EmbeddingCache, keyword_fields: Sequence[str] = KEYWORD_FIELDS
    ) -> None:
        self._embeddings = embeddings
        self._keyword_fields = keyword_fields
        self._lock = threading.Lock()
        self._deferred: dict[str, ItemEntry] = {}  # by item id, as they were stored last

    @property
    def deferred(self) -> int:
        """Number of items with texts that have still to be encoded."""
        return len(self._deferred)

    def apply(self, catalogue: Catalogue, changes: CatalogueChanges, *, defer: bool) -> Catalogue:
        """Return the catalogue after changes; `defer` may leave texts for `encode_deferred`."""
        entries = self._entries(changes.upserted)
        with self._lock:
            for item_id in (*changes.deleted, *(entry.item_id for entry in entries)):
                self._deferred.pop(item_id, None)
        if defer and not self._embeddings.encoder.quick:
            missing = self._embeddings.missing(_texts(entries))
            # Behind deferred texts, even a few would have to wait for the encoder.
            if len(missing) > (0 if self._deferred else _IMMEDIATE_TEXTS):
                with self._lock:
                    for entry in entries:
                        if not missing.isdisjoint(entry.fields.values()):
                            self._deferred[entry.item_id] = entry
                return catalogue.updated(entries, changes.deleted, self._embeddings.known)
        return catalogue.updated(entries, changes.deleted, self._encode)

    def encode_deferred(self) -> None:
        """Encode the texts of some deferred items, the first ones. Takes seconds."""
        with self._lock:
            entries = list(islice(self._deferred.values(), _DEFERRED_ITEMS))
        self._encode(_texts(entries))

    def apply_encoded(self, catalogue: Catalogue) -> Catalogue:
        """Return the catalogue with the keys of the deferred items that are encoded by now."""
        with self._lock:
            first = list(islice(self._deferred.values(), _DEFERRED_ITEMS))
            missing = self._embeddings.missing(_texts(first))
            encoded = [entry for entry in first if missing.isdisjoint(entry.fields.values())]
            for entry in encoded:
                del self._deferred[entry.item_id]
        return catalogue.updated(encoded, [], self._embeddings.known)

    def _entries(self, items: Sequence[Item]) -> list[ItemEntry]:
        dimension = self._embeddings.encoder.dimension
        entries = [to_entry(item, dimension, self._keyword_fields) for item in items]
        unused = sum(item.embedding is not None and entry.embedding is None
                     for item, entry in zip(items, entries, strict=True))  # fmt: skip
        if unused:
            _log.warning(
                "the embeddings of %d items are not used: they have not %d dimensions",
                unused,
                dimension,
            )
        return entries

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed texts; where that takes long, the log says how far it is."""
        logged = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal logged
            if time.monotonic() - logged > _LOG_INTERVAL:
                _log.info("%d of %d texts are encoded", done, total)
                logged = time.monotonic()

        return self._embeddings.encode(texts, progress)


def _texts(entries: Sequence[ItemEntry]) -> list[str]:
    return [text for entry in entries for text in entry.fields.values() if not text.isspace()]
