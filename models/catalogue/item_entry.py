"""Items as they enter the catalogue, and the keys that their texts are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.field_keys import NewKeys
from models.index.mips import normalize_rows

Vectors = NDArray[np.float32]
Encode = Callable[[Sequence[str]], Vectors]

EMBEDDING = "embedding"  # the field name of a vector that the client brought


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
    places: list[int] = []  # among the entries
    codes: list[int] = []
    brought: list[tuple[int, Vectors]] = []
    for place, entry in enumerate(entries):
        for name, text in entry.fields.items():
            if text and not text.isspace():
                texts.append(text)
                places.append(place)
                codes.append(names.setdefault(name, len(names)))
        if entry.embedding is not None:
            brought.append((place, entry.embedding))
    keys = normalize_rows(
        encode(texts)
    )  # also of an encoder whose vectors were kept in half precision
    if brought:
        for _, vector in brought:
            if vector.shape != keys.shape[1:]:
                raise ValueError(f"embedding has dimension {vector.shape[-1]}, not {keys.shape[1]}")
        own = normalize_rows(np.stack([vector for _, vector in brought]))
        keys = np.concatenate([keys, own])
        places += [place for place, _ in brought]
        codes += [names.setdefault(EMBEDDING, len(names))] * len(brought)
    order = np.argsort(places, kind="stable") if brought else np.arange(len(places))
    spoken = np.any(keys != 0, axis=1)  # a text without a token the encoder knows has no key
    if brought or not spoken.all():
        order = order[spoken[order]]
        keys = keys[order]
    owners = rows[np.array(places, dtype=np.int64)[order]].astype(np.int32)
    return NewKeys(keys, owners, np.array(codes, dtype=np.int16)[order]), tuple(names)
