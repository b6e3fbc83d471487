"""The catalogue as a memory: every text field of an item is a key, and the item is its value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.lexical import Document, WordIndex, Words
from models.points import unit
from models.vocabulary import Vocabulary

Vectors = NDArray[np.float32]
Encode = Callable[[Sequence[str]], Vectors]

_NEVER = np.iinfo(np.int64).min  # published_at of items without one
EMBEDDING = "embedding"  # the field name of a vector that the client brought


@dataclass(frozen=True, slots=True)
class Entry:
    """What the catalogue keeps of one item."""

    item_id: str
    title: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)  # field name -> text
    categories: Sequence[str] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    embedding: Vectors | None = None  # [D]
    hidden: bool = False
    published_at: int | None = None  # microseconds UTC


@dataclass(frozen=True, slots=True)
class ItemFilter:
    """Which items may be answered; an empty one lets every listed item pass."""

    any: frozenset[str] = frozenset()  # categories: at least one of these
    all: frozenset[str] = frozenset()  # categories: every one of these
    none: frozenset[str] = frozenset()  # categories: not one of these
    attributes: Mapping[str, Any] = field(default_factory=dict)
    published_since: int | None = None  # inclusive
    published_until: int | None = None  # exclusive


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """A frozen view of all items; `updated` gives the next one.

    Rows are the vocabulary's and never change meaning. An item that was deleted, or that is only
    known from events, has a row that is not `listed`.
    """

    vocabulary: Vocabulary
    titles: tuple[str, ...]
    content: Vectors  # [N, D] unit vectors: the mean of the item's keys; zero without any
    described: NDArray[np.bool_]  # [N] has a content vector
    present: NDArray[np.bool_]  # [N] is in the catalogue, hidden or not
    gone: NDArray[np.bool_]  # [N] was removed from it
    listed: NDArray[np.bool_]  # [N] is present and not hidden
    published: NDArray[np.int64]  # [N] microseconds UTC
    keys: Vectors  # [F, D] a unit vector for each field of each item
    owners: NDArray[np.int32]  # [F] the item row behind each key
    field_codes: NDArray[np.int16]  # [F]
    texts: NDArray[np.int64]  # [F] hash of each key's vector: equal texts are equal keys
    common: Vectors  # [F] log of how many keys are equal to this one
    field_names: tuple[str, ...]
    postings: Mapping[str, NDArray[np.int32]]  # category -> item rows
    attributes: tuple[Mapping[str, Any], ...]
    word_index: WordIndex | None  # shared by the views, as the vocabulary is
    words: Words | None  # what it held when this view was made

    @classmethod
    def empty(
        cls,
        dimension: int,
        vocabulary: Vocabulary | None = None,
        word_index: WordIndex | None = None,
    ) -> Catalogue:
        """A catalogue whose vocabulary is known but whose items are not.

        Args:
            dimension: of the text embeddings.
            vocabulary: whose rows the items have, and are given.
            word_index: an empty one, where the words of the items are wanted too.
        """
        vocabulary = Vocabulary() if vocabulary is None else vocabulary  # an empty one is false
        bare = cls(
            vocabulary=vocabulary,
            titles=(),
            content=np.zeros((0, dimension), dtype=np.float32),
            described=np.zeros(0, dtype=np.bool_),
            present=np.zeros(0, dtype=np.bool_),
            gone=np.zeros(0, dtype=np.bool_),
            listed=np.zeros(0, dtype=np.bool_),
            published=np.zeros(0, dtype=np.int64),
            keys=np.zeros((0, dimension), dtype=np.float32),
            owners=np.zeros(0, dtype=np.int32),
            field_codes=np.zeros(0, dtype=np.int16),
            texts=np.zeros(0, dtype=np.int64),
            common=np.zeros(0, dtype=np.float32),
            field_names=(),
            postings={},
            attributes=(),
            word_index=word_index,
            words=None if word_index is None else word_index.updated([]),
        )
        return bare._grown(len(vocabulary))

    def __len__(self) -> int:
        return len(self.titles)

    @property
    def dimension(self) -> int:
        """D, of the text embeddings."""
        return int(self.content.shape[1])

    def row(self, item_id: str) -> int:
        """The row of an item in this view, or -1."""
        row = self.vocabulary.row(item_id)
        return row if row < len(self) else -1

    def rows(self, item_ids: Sequence[str]) -> NDArray[np.int32]:
        """The rows of items in this view, int32 [n], or -1."""
        rows = self.vocabulary.rows(item_ids)
        return np.where(rows < len(self), rows, np.int32(-1))

    # ------------------------------------------------------------------ growing

    def covering(self, item_ids: Iterable[str]) -> Catalogue:
        """This catalogue with a row for each of these ids; new ones are not listed."""
        for item_id in item_ids:
            self.vocabulary.add(item_id)
        return self._grown(len(self.vocabulary))

    def updated(
        self, entries: Iterable[Entry], removed: Iterable[str], encode: Encode
    ) -> Catalogue:
        """The catalogue after upserts and removals. This view stays as it was.

        Args:
            entries: new or changed items; of several with one id the last counts.
            removed: ids that are no longer in the catalogue; their rows stay, unlisted.
            encode: texts -> unit vectors [n, D].

        Raises:
            ValueError: when an embedding is not of dimension D.
        """
        latest = {entry.item_id: entry for entry in entries}
        gone = [id_ for id_ in removed if id_ not in latest]
        if not latest and not gone:
            return self
        rows = np.array([self.vocabulary.add(id_) for id_ in latest], dtype=np.int32)
        new = self._grown(len(self.vocabulary))
        touched = np.concatenate([rows, new.rows(gone)])
        touched = touched[touched >= 0]

        titles, attributes = list(new.titles), list(new.attributes)
        listed, published = new.listed.copy(), new.published.copy()
        listed[touched], published[touched] = False, _NEVER
        present, removed_rows = new.present.copy(), new.gone.copy()
        present[touched], removed_rows[touched] = False, True
        present[rows], removed_rows[rows] = True, False
        for row in touched.tolist():
            titles[row], attributes[row] = "", {}
        postings = _without(new.postings, touched)
        keys, owners, codes, names = _field_keys(latest.values(), rows, new.field_names, encode)
        stays = ~np.isin(new.owners, touched)
        for row, entry in zip(rows.tolist(), latest.values(), strict=True):
            titles[row], attributes[row] = entry.title, entry.attributes
            listed[row] = not entry.hidden
            if entry.published_at is not None:
                published[row] = entry.published_at
        for category, members in _by_category(latest.values(), rows).items():
            known = postings.get(category, np.zeros(0, dtype=np.int32))
            postings[category] = np.concatenate([known, members])
        content = new.content.copy()
        content[touched] = 0.0
        np.add.at(content, owners, keys)
        norms = np.linalg.norm(content[rows], axis=1, keepdims=True)
        content[rows] /= np.where(norms > 0, norms, 1.0)
        described = new.described.copy()
        described[touched] = False
        described[owners] = True
        texts = np.concatenate([new.texts[stays], _hashes(keys)])
        _, same, count = np.unique(texts, return_inverse=True, return_counts=True)
        return replace(
            new,
            titles=tuple(titles),
            content=content,
            described=described,
            present=present,
            gone=removed_rows,
            listed=listed,
            published=published,
            keys=np.concatenate([new.keys[stays], keys]),
            owners=np.concatenate([new.owners[stays], owners]),
            field_codes=np.concatenate([new.field_codes[stays], codes]),
            texts=texts,
            common=np.log(count[same]).astype(np.float32),
            field_names=names,
            postings=postings,
            attributes=tuple(attributes),
            words=self._words_of(rows, latest.values(), new.rows(gone)),
        )

    def _words_of(
        self, rows: NDArray[np.int32], entries: Iterable[Entry], gone: NDArray[np.int32]
    ) -> Words | None:
        """The words after these upserts and removals."""
        if self.word_index is None:
            return None
        documents = (
            Document(
                row, entry.title, [text for name, text in entry.fields.items() if name != "title"]
            )
            for row, entry in zip(rows.tolist(), entries, strict=True)
        )
        return self.word_index.updated(documents, gone[gone >= 0].tolist())

    def _grown(self, size: int) -> Catalogue:
        """This view with empty rows up to `size`."""
        more = size - len(self)
        if more <= 0:
            return self
        return replace(
            self,
            titles=self.titles + ("",) * more,
            content=np.concatenate([self.content, np.zeros((more, self.dimension), np.float32)]),
            described=np.concatenate([self.described, np.zeros(more, np.bool_)]),
            present=np.concatenate([self.present, np.zeros(more, np.bool_)]),
            gone=np.concatenate([self.gone, np.zeros(more, np.bool_)]),
            listed=np.concatenate([self.listed, np.zeros(more, np.bool_)]),
            published=np.concatenate([self.published, np.full(more, _NEVER)]),
            attributes=self.attributes + ({},) * more,
        )

    # ------------------------------------------------------------------ filtering

    @property
    def offered(self) -> NDArray[np.bool_]:
        """What may be answered, bool [N]: the listed items.

        Without any catalogue, the items are those of the events: all of them.
        """
        return self.listed if self.present.any() else ~self.gone

    def allowed(self, wanted: ItemFilter) -> NDArray[np.bool_]:
        """The offered items that pass a filter, bool [N]; exact however narrow.

        An attribute passes when it equals the wanted value, is one of the wanted values (when
        those are a list) or is a list that holds one of them.
        """
        allowed = self.offered.copy()
        if wanted.any:
            allowed &= self.in_categories(wanted.any)
        for category in wanted.all:
            allowed &= self.in_categories([category])
        if wanted.none:
            allowed &= ~self.in_categories(wanted.none)
        if wanted.published_since is not None:
            allowed &= self.published >= wanted.published_since
        if wanted.published_until is not None:
            allowed &= (self.published < wanted.published_until) & (self.published != _NEVER)
        if wanted.attributes:
            for row in np.flatnonzero(allowed).tolist():
                has = self.attributes[row]
                allowed[row] = all(
                    name in has and _matches(has[name], value)
                    for name, value in wanted.attributes.items()
                )
        return allowed

    def in_categories(self, categories: Iterable[str]) -> NDArray[np.bool_]:
        """The items in at least one of the categories, bool [N]."""
        inside = np.zeros(len(self), dtype=np.bool_)
        for category in categories:
            if category in self.postings:
                inside[self.postings[category]] = True
        return inside


def _hashes(keys: Vectors) -> NDArray[np.int64]:
    """A hash of each key's bits, [F]."""
    odd = np.random.default_rng(0).integers(1, 2**62, keys.shape[1], dtype=np.int64) * 2 + 1
    bits = (keys + np.float32(0)).view(np.int32).astype(np.int64)  # + 0 turns -0 into 0
    with np.errstate(over="ignore"):
        return bits @ odd


def _matches(value: Any, wanted: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    accepted = wanted if isinstance(wanted, list) else [wanted]
    # 1 == True in Python, but not in JSON.
    return any(v == w and isinstance(v, bool) == isinstance(w, bool)
               for v in values for w in accepted)  # fmt: skip


def _without(
    postings: Mapping[str, NDArray[np.int32]], rows: NDArray[np.int32]
) -> dict[str, NDArray[np.int32]]:
    left = {name: members[~np.isin(members, rows)] for name, members in postings.items()}
    return {name: members for name, members in left.items() if len(members)}


def _by_category(entries: Iterable[Entry], rows: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
    members: dict[str, list[int]] = {}
    for row, entry in zip(rows.tolist(), entries, strict=True):
        for category in dict.fromkeys(entry.categories):
            members.setdefault(category, []).append(row)
    return {name: np.array(found, dtype=np.int32) for name, found in members.items()}


def _field_keys(
    entries: Iterable[Entry],
    rows: NDArray[np.int32],
    known_names: tuple[str, ...],
    encode: Encode,
) -> tuple[Vectors, NDArray[np.int32], NDArray[np.int16], tuple[str, ...]]:
    """Keys [F, D], owners [F] and field codes [F] of the entries, and all field names."""
    names = {name: code for code, name in enumerate(known_names)}
    texts: list[str] = []
    owners: list[int] = []
    codes: list[int] = []
    brought: list[tuple[int, Vectors]] = []
    for row, entry in zip(rows.tolist(), entries, strict=True):
        for name, text in entry.fields.items():
            if text and not text.isspace():
                texts.append(text)
                owners.append(row)
                codes.append(names.setdefault(name, len(names)))
        if entry.embedding is not None:
            brought.append((row, entry.embedding))
    keys = unit(encode(texts))  # also of an encoder whose vectors were kept in half precision
    if brought:
        for _, vector in brought:
            if vector.shape != keys.shape[1:]:
                raise ValueError(f"embedding has dimension {vector.shape[-1]}, not {keys.shape[1]}")
        own = unit(np.stack([vector for _, vector in brought]))
        keys = np.concatenate([keys, own])
        owners += [row for row, _ in brought]
        codes += [names.setdefault(EMBEDDING, len(names))] * len(brought)
    spoken = np.any(keys != 0, axis=1)  # a text without a token the encoder knows has no key
    return (
        keys[spoken],
        np.array(owners, dtype=np.int32)[spoken],
        np.array(codes, dtype=np.int16)[spoken],
        tuple(names),
    )
