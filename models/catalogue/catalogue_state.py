"""Serialisation of a catalogue: the arrays and strings that a start would otherwise compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from models.catalogue.catalogue import Catalogue
from models.catalogue.cow_array import CowArray
from models.catalogue.cow_list import CowList
from models.catalogue.field_keys import FieldKeys
from models.catalogue.fields.field_columns import NO_NUMBER, NO_POINT, FieldColumns, ItemColumns
from models.catalogue.fields.keyword_column import KeywordColumn
from models.catalogue.fields.value_column import ValueColumn

Bytes = NDArray[np.uint8]

# Parts of a state. The vectors, which are nearly all of it, are parts of their own, so that reading
# one takes no second copy of the whole.
KEYS, CONTENT, COLUMNS = "keys", "content", "columns"
PARTS = (KEYS, CONTENT, COLUMNS)
FORMAT = 4  # of the parts; another one for any change of what they hold or how it is computed

_BY_ITEM = ("has_content", "is_named", "present", "deleted", "visible", "published")
_MISSING = {"keywords": 0, "numbers": NO_NUMBER, "points": NO_POINT}


def catalogue_to_parts(catalogue: Catalogue) -> dict[str, Bytes]:
    """Return the state of a catalogue whose BM25 writer recorded all that it holds, by part."""
    arrays: dict[str, NDArray[Any]] = {name: getattr(catalogue, name) for name in _BY_ITEM}
    arrays |= {f"keys.{name}": array for name, array in catalogue.keys.arrays().items()}
    fields: dict[str, Any] = {}
    for at, (name, columns) in enumerate(catalogue.columns.fields.items()):
        fields[name] = {
            kind: _column_to_arrays(getattr(columns, kind), f"{at}.{kind}", arrays)
            for kind in _MISSING
            if getattr(columns, kind) is not None
        }
    strings = {
        "ids": list(catalogue.vocabulary.ids[: len(catalogue)]),
        "titles": list(catalogue.titles),
        "attributes": list(catalogue.attributes),
        "key_names": catalogue.keys.names,
        "orphans": catalogue.keys.orphans,
        "fields": fields,
        "bm25": None if catalogue.bm25_writer is None else catalogue.bm25_writer.recording(),
    }
    arrays["strings"] = np.frombuffer(orjson.dumps(strings), np.uint8)
    return {
        KEYS: _as_bytes(catalogue.keys.vectors),
        CONTENT: _as_bytes(catalogue.content),
        COLUMNS: np.frombuffer(save({n: np.ascontiguousarray(a) for n, a in arrays.items()}), "u1"),
    }


def catalogue_from_parts(empty: Catalogue, parts: Mapping[str, Bytes]) -> Catalogue:
    """Return the catalogue of a state, whose bytes the caller has verified.

    Args:
        empty: a catalogue without items, whose vocabulary and BM25 writer are filled.
        parts: from `catalogue_to_parts`, of a catalogue of the same dimension.

    Raises:
        ValueError: when a part is malformed; the vocabulary is as it was.
    """
    try:
        arrays = load(parts[COLUMNS].tobytes())
        strings = orjson.loads(arrays.pop("strings").tobytes())
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"not a state of a catalogue: {error}") from error
    rows = parts[CONTENT].view(np.float32).reshape(len(strings["ids"]), empty.dimension)
    vectors = parts[KEYS].view(np.float32).reshape(-1, empty.dimension)
    columns = {name: _columns(kinds, arrays) for name, kinds in strings["fields"].items()}
    key_arrays = {name[5:]: array for name, array in arrays.items() if name.startswith("keys.")}
    keys = FieldKeys.of(tuple(strings["key_names"]), vectors, key_arrays, strings["orphans"])
    writer = empty.bm25_writer
    bm25_index = None if writer is None else writer.replay(strings["bm25"])
    empty.vocabulary.extend(strings["ids"])
    by_item: dict[str, Any] = {name: arrays[name] for name in _BY_ITEM}
    return replace(
        empty,
        **by_item,
        titles=CowList(strings["titles"]),
        attributes=CowList(strings["attributes"]),
        content_rows=empty.content_rows.extended(rows),
        keys=keys,
        columns=ItemColumns(columns),
        bm25_index=bm25_index,
    )


def _as_bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _column_to_arrays(column: Any, name: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Put the arrays of a column beside the others, and return the rest of it."""
    rest: dict[str, Any] = {"name": name}
    if isinstance(column, KeywordColumn):
        rest["strings"] = list(column.vocabulary.ids)
        arrays[f"{name}.counts"] = column.counts.array
        column = column.codes
    for at, dense in enumerate(column.dense):
        arrays[f"{name}.dense{at}"] = _real(dense.array)
    arrays[f"{name}.extra_rows"] = column.extra_rows.array
    arrays[f"{name}.extra_values"] = _real(column.extra_values.array)
    is_complex = column.dtype == np.complex128
    return rest | {"dense": len(column.dense), "dead": column.dead, "complex": is_complex}


def _columns(kinds: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> FieldColumns:
    columns: dict[str, Any] = {}
    for kind, rest in kinds.items():
        name = rest["name"]
        found = {key: arrays[f"{name}.{key}"] for key in ("extra_rows", "extra_values")}
        found |= {str(at): arrays[f"{name}.dense{at}"] for at in range(rest["dense"])}
        if rest["complex"]:
            found = {
                key: array if key == "extra_rows" else array.view(np.complex128)
                for key, array in found.items()
            }
        cow = {key: _cow(array) for key, array in found.items()}
        dense = tuple(cow[str(at)] for at in range(rest["dense"]))
        values: ValueColumn[Any] = ValueColumn(
            dense, cow["extra_rows"], cow["extra_values"], _MISSING[kind], rest["dead"]
        )
        columns[kind] = values
        if kind == "keywords":
            counts = _cow(arrays[f"{name}.counts"])
            columns[kind] = KeywordColumn.of(values, rest["strings"], counts)
    return FieldColumns(**columns)


def _cow(array: NDArray[Any]) -> CowArray[Any]:
    return CowArray(array[:0]).extended(array)


def _real(array: NDArray[Any]) -> NDArray[Any]:
    """Return complex numbers as pairs, which safetensors has."""
    return array.view(np.float64) if array.dtype == np.complex128 else array
