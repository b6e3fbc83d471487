"""The catalogue as a memory: every text field of an item is a key, and the item is its value."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from models.catalogue.columns import (
    NEVER,
    NO_NUMBER,
    NO_POINT,
    FieldColumns,
    ItemFields,
    KeywordColumn,
    StringOrder,
    ValueColumn,
    updated_columns,
)
from models.catalogue.cow import CowArray, CowList
from models.catalogue.field_keys import FieldKeys, Vectors
from models.catalogue.item_filter import EVERYTHING, Condition, ItemFilter, matching
from models.catalogue.item_values import (
    Encode,
    ItemEntry,
    attribute_values,
    item_values,
    keys_of_entries,
)
from models.data.vocabulary import Vocabulary
from models.text.bm25 import BM25Index, BM25Writer, Document

_TRACKED_VERSIONS = 4  # earlier versions that a version knows its changes since


class _Change(NamedTuple):
    previous: weakref.ref[Catalogue]
    rows: NDArray[np.int64]  # item rows that the step changed


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Catalogue:
    """A frozen version of all items; `updated` returns the next one.

    Rows are the vocabulary's and never change meaning. An item that was deleted, or that is only
    known from events, has a row that is not `visible`.
    """

    vocabulary: Vocabulary
    titles: CowList[str]
    content_rows: CowArray[np.float32]  # [N, D] see `content`
    has_content: NDArray[np.bool_]  # [N] has a content vector
    is_named: NDArray[np.bool_]  # [N] has a title or another text of its own
    present: NDArray[np.bool_]  # [N] is in the catalogue, hidden or not
    deleted: NDArray[np.bool_]  # [N] was removed from the catalogue
    visible: NDArray[np.bool_]  # [N] is present and not hidden
    published: NDArray[np.int64]  # [N] microseconds UTC
    keys: FieldKeys  # what search compares a query with
    attributes: CowList[Mapping[str, Any]]
    columns: Mapping[
        str, FieldColumns
    ]  # what filters, facets and sorting read, but for ids and `published`
    id_order: StringOrder  # of the vocabulary
    bm25_writer: BM25Writer | None  # shared by the views, as the vocabulary is
    bm25_index: BM25Index | None  # what it held when this view was made
    _history: tuple[_Change, ...]  # the views before this one that it knows its changes since

    @classmethod
    def empty(
        cls,
        dimension: int,
        vocabulary: Vocabulary | None = None,
        bm25_writer: BM25Writer | None = None,
    ) -> Catalogue:
        """Return a catalogue without items, for text embeddings of a dimension.

        The vocabulary gives items their rows. With an empty `bm25_writer`, items are also found by
        their words.
        """
        vocabulary = Vocabulary() if vocabulary is None else vocabulary  # an empty one is false
        bare = cls(
            vocabulary=vocabulary,
            titles=CowList(),
            content_rows=CowArray(np.zeros((0, dimension), dtype=np.float32)),
            has_content=np.zeros(0, dtype=np.bool_),
            is_named=np.zeros(0, dtype=np.bool_),
            present=np.zeros(0, dtype=np.bool_),
            deleted=np.zeros(0, dtype=np.bool_),
            visible=np.zeros(0, dtype=np.bool_),
            published=np.zeros(0, dtype=np.int64),
            keys=FieldKeys.empty(dimension),
            attributes=CowList(),
            columns={},
            id_order=StringOrder(vocabulary),
            bm25_writer=bm25_writer,
            bm25_index=None if bm25_writer is None else bm25_writer.update([]),
            _history=(),
        )
        return bare._extended_to(len(vocabulary))

    def __len__(self) -> int:
        return len(self.titles)

    @property
    def dimension(self) -> int:
        return int(self.content.shape[1])

    @property
    def content(self) -> Vectors:
        """[N, D] unit vectors: the mean of the item's keys; zero without any."""
        return self.content_rows.array

    def row(self, item_id: str) -> int:
        """Return the row of an item, or -1 where this version has none."""
        row = self.vocabulary.row(item_id)
        return row if row < len(self) else -1

    def rows(self, item_ids: Sequence[str]) -> NDArray[np.int32]:
        """Return the rows of items, int32 [n]; -1 for items that this version does not have."""
        rows = self.vocabulary.rows(item_ids)
        return np.where(rows < len(self), rows, np.int32(-1))

    # ------------------------------------------------------------------ growing

    def with_items(self, item_ids: Iterable[str]) -> Catalogue:
        """Return this catalogue with a row for each of these ids; new rows are not visible."""
        self.vocabulary.extend(item_ids)
        return self._extended_to(len(self.vocabulary))

    def updated(
        self, entries: Iterable[ItemEntry], removed: Iterable[str], encode: Encode
    ) -> Catalogue:
        """Return the catalogue after upserts and removals.

        The last of several entries with one id counts. Rows of removed items stay, invisible.
        Raises ValueError when an embedding is not of dimension D.
        """
        latest = {entry.item_id: entry for entry in entries}
        lost = [id_ for id_ in removed if id_ not in latest]
        if not latest and not lost:
            return self
        rows = np.array([self.vocabulary.add(id_) for id_ in latest], dtype=np.int64)
        grown = self._extended_to(len(self.vocabulary))
        if grown is not self:
            return grown.updated(latest.values(), lost, encode)
        lost_rows = self.rows(lost).astype(np.int64)
        lost_rows = np.unique(lost_rows[lost_rows >= 0])
        touched = np.concatenate([rows, lost_rows])
        in_catalogue = np.arange(len(touched)) < len(rows)
        # A removed item's row holds what an item without any content would.
        changed = [*latest.values(), *[ItemEntry("", hidden=True)] * len(lost_rows)]
        return replace(
            self,
            **self._text_columns(changed, touched, encode),
            **self._metadata_columns(changed, touched, in_catalogue),
            bm25_index=self._updated_bm25(changed, touched),
            _history=self._history_after(touched),
        )

    def changed_since(self, other: Catalogue) -> NDArray[np.int64] | None:
        """Return the rows [n] changed or added since an earlier version; None = not known."""
        if other is self:
            return np.zeros(0, np.int64)
        for at, step in enumerate(self._history):
            if step.previous() is other:
                rows = np.concatenate([later.rows for later in self._history[at:]])
                return np.union1d(rows, np.arange(len(other), len(self)))
        return None

    def with_keys(self, keys: FieldKeys) -> Catalogue:
        if keys is self.keys:
            return self
        return replace(self, keys=keys, _history=self._history_after(np.zeros(0, np.int64)))

    def _history_after(self, rows: NDArray[np.int64]) -> tuple[_Change, ...]:
        return (*self._history, _Change(weakref.ref(self), rows))[-_TRACKED_VERSIONS:]

    def _text_columns(
        self, entries: Iterable[ItemEntry], rows: NDArray[np.int64], encode: Encode
    ) -> dict[str, Any]:
        keys, names = keys_of_entries(entries, rows, self.keys.names, encode)
        content = np.zeros((len(rows), self.dimension), np.float32)
        # The keys stand in the order of the rows, each item's side by side.
        at = np.flatnonzero(np.isin(rows, keys.owners))
        sums = np.add.reduceat(keys.vectors, np.flatnonzero(np.diff(keys.owners, prepend=-1)))
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        content[at] = sums / np.where(norms > 0, norms, 1.0)
        has_content = self.has_content.copy()
        has_content[rows] = False
        has_content[rows[at]] = True
        return {
            "content_rows": self.content_rows.updated(rows, content),
            "has_content": has_content,
            "keys": self.keys.updated(rows, keys, names),
        }

    def _metadata_columns(
        self,
        entries: Collection[ItemEntry],
        rows: NDArray[np.int64],
        in_catalogue: NDArray[np.bool_],
    ) -> dict[str, Any]:
        present, deleted = self.present.copy(), self.deleted.copy()
        visible, published = self.visible.copy(), self.published.copy()
        present[rows], deleted[rows] = in_catalogue, ~in_catalogue
        visible[rows] = [not entry.hidden for entry in entries]
        is_named = self.is_named.copy()
        is_named[rows] = [entry.is_named for entry in entries]
        published[rows] = [
            NEVER if entry.published_at is None else entry.published_at for entry in entries
        ]
        new_values = item_values(rows.tolist(), entries)
        old_rows = self._rows_with_values(rows)
        return {
            "is_named": is_named,
            "present": present,
            "deleted": deleted,
            "visible": visible,
            "published": published,
            "titles": self.titles.updated(rows, [entry.title for entry in entries]),
            "attributes": self.attributes.updated(rows, [entry.attributes for entry in entries]),
            "columns": updated_columns(self.columns, old_rows, new_values, len(self)),
        }

    def _rows_with_values(self, rows: NDArray[np.int64]) -> dict[str, set[int]]:
        listed = rows[self.present[rows]]
        attributes = attribute_values(listed.tolist(), self.attributes.take(listed))
        # The values of other fields have no record beside their columns.
        having = {name: {*listed.tolist()} for name in ("title", "categories", "tags")}
        for name, values in attributes.items():
            having[name] = {*values.keyword_rows, *values.number_rows}
        return having

    def _updated_bm25(
        self, entries: Iterable[ItemEntry], rows: NDArray[np.int64]
    ) -> BM25Index | None:
        if self.bm25_writer is None:
            return None
        return self.bm25_writer.update(
            Document(
                row,
                entry.fields.get("title", ""),
                [text for name, text in entry.fields.items() if name != "title"],
                # A hidden item is found by nothing: without text it is no document.
                {} if entry.hidden else entry.keywords,
            )
            for row, entry in zip(rows.tolist(), entries, strict=True)
        )

    def _extended_to(self, size: int) -> Catalogue:
        more = size - len(self)
        if more <= 0:
            return self
        dark = np.zeros(more, np.bool_)
        return replace(
            self,
            titles=self.titles.extended([""] * more),
            content_rows=self.content_rows.extended(np.zeros((more, self.dimension), np.float32)),
            has_content=np.concatenate([self.has_content, dark]),
            is_named=np.concatenate([self.is_named, dark]),
            present=np.concatenate([self.present, dark]),
            deleted=np.concatenate([self.deleted, dark]),
            visible=np.concatenate([self.visible, dark]),
            published=np.concatenate([self.published, np.full(more, NEVER)]),
            keys=self.keys.extended_to(size),
            attributes=self.attributes.extended([{} for _ in range(more)]),
            _history=self._history_after(np.zeros(0, np.int64)),
        )

    # ------------------------------------------------------------------ filtering

    def prepare_order(self) -> None:
        """Order all ids and titles, which the first sorted list would wait for otherwise.

        A second or two for a million items, once: later versions add their new ones.
        """
        self.fields.id_ranks()
        titles = self.fields.columns_of("title").keywords
        if titles is not None:
            titles.sort_keys()

    @property
    def fields(self) -> ItemFields:
        return ItemFields(len(self), self.vocabulary, self.id_order, self.published, self.columns)

    @property
    def servable(self) -> NDArray[np.bool_]:
        """Items that may be answered, bool [N]: the visible ones.

        Without any catalogue, the items are those of the events: all of them.
        """
        return self.visible if self.present.any() else ~self.deleted

    def withheld(self, rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Mark the items [n] that no answer may name: hidden and deleted ones.

        An item that is only known from events is not withheld. Row -1 and rows beyond the catalogue
        are no items.
        """
        withheld = (rows >= 0) & (rows < len(self))
        at = rows[withheld]
        withheld[withheld] = self.deleted[at] | (self.present[at] & ~self.visible[at])
        return withheld

    def allowed(self, wanted: ItemFilter = EVERYTHING) -> NDArray[np.bool_]:
        """Return the servable items that pass a filter, bool [N]; exact however narrow."""
        return self.servable & matching(self.fields, wanted)

    def in_categories(self, categories: Iterable[str]) -> NDArray[np.bool_]:
        """Mark the items in at least one of the categories, bool [N]."""
        return matching(self.fields, Condition("categories", {"in": list(categories)}))


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
    for at, (name, columns) in enumerate(catalogue.columns.items()):
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

    The vocabulary and the BM25 writer of `empty`, of the same dimension, are filled. Raises
    ValueError when a part is malformed; the vocabulary is then as it was.
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
        columns=columns,
        bm25_index=bm25_index,
    )


def _as_bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _column_to_arrays(column: Any, name: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
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
        parts = [arrays[f"{name}.dense{at}"] for at in range(rest["dense"])]
        parts.append(arrays[f"{name}.extra_values"])
        if rest["complex"]:
            parts = [array.view(np.complex128) for array in parts]
        *dense, extra_values = map(_cow, parts)
        extra_rows = _cow(arrays[f"{name}.extra_rows"])
        values: ValueColumn[Any] = ValueColumn(
            tuple(dense), extra_rows, extra_values, _MISSING[kind], rest["dead"]
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
