"""Items as they enter the catalogue, and the keys that their texts are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.field_keys import NewKeys, Vectors
from models.index.ann_index import normalize_rows

Encode = Callable[[Sequence[str]], Vectors]

EMBEDDING = "embedding"  # the field name of a vector that the client brought
_LABELS = frozenset({"tags", "categories"})  # fields that items share, and that name none


@dataclass(frozen=True, slots=True)
class ItemEntry:
    """One item as the catalogue holds it."""

    item_id: str
    title: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)  # field name -> text
    categories: Sequence[str] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    embedding: Vectors | None = None  # [D]
    hidden: bool = False
    published_at: int | None = None  # microseconds UTC
    tags: Sequence[str] = ()
    keywords: Mapping[str, Sequence[str]] = field(default_factory=dict)  # field name -> identifiers

    @property
    def is_named(self) -> bool:
        """True if the item has a title or another text of its own, beside tags and categories."""
        texts = (text for name, text in self.fields.items() if name not in _LABELS)
        return bool(self.title.strip()) or any(text.strip() for text in texts)


def keys_of_entries(
    entries: Iterable[ItemEntry],
    rows: NDArray[np.int64],
    known_names: tuple[str, ...],
    encode: Encode,
) -> tuple[NewKeys, tuple[str, ...]]:
    """Return the keys of entries, those of one side by side, and the names of all fields.

    Args:
        entries: the items.
        rows: of the entries in the catalogue [n].
        known_names: of fields that have codes already.
        encode: texts -> unit vectors [k, D].

    Raises:
        ValueError: when an embedding is not of dimension D.
    """
    names = {name: code for code, name in enumerate(known_names)}
    texts: list[str] = []
    places: list[int] = []  # of each key among the entries
    codes: list[int] = []
    brought: dict[int, Vectors] = {}  # by the place among the keys
    for place, entry in enumerate(entries):
        for name, text in entry.fields.items():
            if text and not text.isspace():
                texts.append(text)
                places.append(place)
                codes.append(names.setdefault(name, len(names)))
        if entry.embedding is not None:
            brought[len(places)] = entry.embedding
            places.append(place)
            codes.append(-1)
    keys, field_codes = encode(texts), np.array(codes, dtype=np.int16)
    if brought:
        for vector in brought.values():
            if vector.shape != keys.shape[1:]:
                raise ValueError(f"embedding has dimension {vector.shape[-1]}, not {keys.shape[1]}")
        at = np.array([*brought])
        field_codes[at] = names.setdefault(EMBEDDING, len(names))
        keys = np.insert(keys, at - np.arange(len(at)), [*brought.values()], axis=0)
    keys = normalize_rows(keys)  # also of an encoder whose vectors were kept in half precision
    owners = rows[np.array(places, dtype=np.int64)].astype(np.int32)
    spoken = np.any(keys != 0, axis=1)  # a text without a token the encoder knows has no key
    if not spoken.all():
        keys, owners, field_codes = keys[spoken], owners[spoken], field_codes[spoken]
    return NewKeys(keys, owners, field_codes), tuple(names)
