"""The keys of search: a unit vector for each text field of each item, and its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.attention.partial_softmax import stratified_rows
from models.catalogue.cow import CowArray
from models.data.vocabulary import expand_ranges

Vectors = NDArray[np.float32]
Positions = NDArray[np.int64]

NO_OWNER = -1  # the owner of a key that its item no longer has
_BLOCK = 65_536  # keys that are hashed at once


class NewKeys(NamedTuple):
    vectors: Vectors  # [F, D] of unit length
    owners: NDArray[np.int32]  # [F] item rows
    codes: NDArray[np.int16]  # [F] rows of the fields' names


@dataclass(frozen=True, slots=True, eq=False)
class FieldKeys:
    """A frozen version of all keys; `updated` returns the next one.

    A key never moves: one that its item no longer has stays where it was and is `NO_OWNER`'s, so
    that an index over the first keys of a version holds for every later one. `compacted` leaves
    those out.
    """

    names: tuple[str, ...]  # of the fields
    _vectors: CowArray[np.float32]  # [F, D]
    _owners: CowArray[np.int32]  # [F]
    _codes: CowArray[np.int16]  # [F]
    _texts: CowArray[np.int64]  # [F] hash of each key's vector: equal texts are equal keys
    _log_frequency: CowArray[np.float32]  # [F]
    _spans: CowArray[np.int64]  # [N, 2] the first key of each item, and how many it has
    orphans: int  # number of keys without an owner
    # Caches of what most requests ask for, filled by the first one.
    _mask_cache: list[tuple[NDArray[np.bool_], NDArray[np.bool_]]] = field(default_factory=list)
    _sample_cache: list[tuple[Positions, Vectors]] = field(default_factory=list)

    @classmethod
    def empty(cls, dimension: int) -> FieldKeys:
        """Return the keys of a catalogue without items."""
        return cls(
            names=(),
            _vectors=CowArray(np.zeros((0, dimension), np.float32)),
            _owners=CowArray(np.zeros(0, np.int32)),
            _codes=CowArray(np.zeros(0, np.int16)),
            _texts=CowArray(np.zeros(0, np.int64)),
            _log_frequency=CowArray(np.zeros(0, np.float32)),
            _spans=CowArray(np.zeros((0, 2), np.int64)),
            orphans=0,
        )

    @classmethod
    def of(
        cls,
        names: tuple[str, ...],
        vectors: Vectors,
        arrays: Mapping[str, NDArray[Any]],
        orphans: int,
    ) -> FieldKeys:
        """Return the keys of vectors [F, D], of `arrays()` and of the other fields of a version."""
        columns: dict[str, Any] = {
            f"_{name}": CowArray(a[:0]).extended(a) for name, a in arrays.items()
        }
        stored = CowArray(vectors[:0]).extended(vectors)
        return cls(names, stored, orphans=orphans, **columns)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays but the vectors, by name."""
        names = ("owners", "codes", "texts", "log_frequency", "spans")
        return {name: getattr(self, f"_{name}").array for name in names}

    def __len__(self) -> int:
        """Number of keys, those without an owner included."""
        return len(self._owners)

    @property
    def vectors(self) -> Vectors:
        """[F, D] of unit length."""
        return self._vectors.array

    @property
    def owners(self) -> NDArray[np.int32]:
        """[F] the item row behind each key, or `NO_OWNER`."""
        return self._owners.array

    @property
    def codes(self) -> NDArray[np.int16]:
        """[F] rows of `names`."""
        return self._codes.array

    @property
    def log_frequency(self) -> NDArray[np.float32]:
        """[F] log of how many keys are equal to this one."""
        return self._log_frequency.array

    def positions_of(self, rows: NDArray[np.int64]) -> tuple[Positions, NDArray[np.int64]]:
        """Return the places of the keys of items [n], item by item, and the item of each key."""
        items, places = expand_ranges(*self._spans.array[rows].T)
        return places, items

    def counts_of(self, rows: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = self._spans.array[rows, 1]
        return counts

    def mask(self, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which keys [F] are of allowed items [N]; not to be written to."""
        if not len(allowed):
            return np.zeros(len(self), dtype=np.bool_)
        for known, owned in self._mask_cache:
            if np.array_equal(known, allowed):
                return owned
        owned = allowed[self.owners]  # of -1 the last item's, which is put right
        if self.orphans:
            owned &= self.owners != NO_OWNER
        self._mask_cache[:] = [(allowed.copy(), owned)]
        return owned

    def sample(self) -> tuple[Positions, Vectors]:
        """Return a stratified sample of the keys: places [m], rising, and vectors [m, D].

        Keys without an owner are included.
        """
        if not self._sample_cache:
            places = stratified_rows(len(self)).numpy()
            self._sample_cache[:] = [(places, self.vectors[places])]
        return self._sample_cache[0]

    def extended_to(self, size: int) -> FieldKeys:
        """Return this version with room for the keys of `size` items, N; new items have none."""
        more = size - len(self._spans)
        if more <= 0:
            return self
        return replace(self, _spans=self._spans.extended(np.zeros((more, 2), np.int64)))

    def updated(self, rows: NDArray[np.int64], new: NewKeys, names: tuple[str, ...]) -> FieldKeys:
        """Return the keys after distinct items lost theirs, and some of them got new ones.

        `names` are the names of the fields: the present ones, then new ones.
        """
        left, _ = self.positions_of(rows)
        texts = _hashes(new.vectors)
        all_texts = self._texts.extended(texts)
        no_owners = np.full(len(left), NO_OWNER, np.int32)
        owners = self._owners.updated(left, no_owners, new.owners)
        affected = np.unique(np.concatenate([self._texts.array[left], texts]))
        places, common = _log_frequencies(all_texts.array, owners.array, affected)
        old = places < len(self)
        return FieldKeys(
            names=names,
            _vectors=self._vectors.extended(new.vectors),
            _owners=owners,
            _codes=self._codes.extended(new.codes),
            _texts=all_texts,
            _log_frequency=self._log_frequency.updated(places[old], common[old], common[~old]),
            _spans=self._spans.updated(rows, self._spans_after(rows, new.owners)),
            orphans=self.orphans + len(left),
        )

    def _spans_after(self, rows: NDArray[np.int64], owners: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the first place and the number of the new keys of each item, [n, 2]."""
        items, begins, counts = np.unique(owners, return_index=True, return_counts=True)
        spans = np.zeros((len(rows), 2), np.int64)
        order = np.argsort(rows)
        at = order[np.searchsorted(rows, items, sorter=order)]
        spans[at] = np.column_stack([len(self) + begins, counts])
        return spans

    def compacted(self) -> FieldKeys:
        """Return the keys that have an owner, at new places."""
        stay = np.flatnonzero(self.owners != NO_OWNER)
        new = NewKeys(self.vectors[stay], self.owners[stay], self.codes[stay])
        empty = FieldKeys.empty(self.vectors.shape[1]).extended_to(len(self._spans))
        return empty.updated(np.arange(len(self._spans)), new, self.names)

    def rebased(self, base: FieldKeys, moved: FieldKeys) -> FieldKeys:
        """Return this version as it would be, had it come from `moved`.

        `moved` has the keys of `base`, an earlier version, at other places, as `compacted` gives.
        """
        if moved is base:
            return self
        first = len(base)
        left = (self.owners[:first] == NO_OWNER) & (base.owners != NO_OWNER)
        added = np.flatnonzero(self.owners[first:] != NO_OWNER) + first
        rows = np.union1d(base.owners[left], self.owners[added]).astype(np.int64)
        new = NewKeys(self.vectors[added], self.owners[added], self.codes[added])
        return moved.extended_to(len(self._spans)).updated(rows, new, self.names)


def _log_frequencies(
    texts: NDArray[np.int64], owners: NDArray[np.int32], affected: NDArray[np.int64]
) -> tuple[Positions, NDArray[np.float32]]:
    """Return the places of the keys of these texts, ascending, and the log of each one's count."""
    places = np.flatnonzero(np.isin(texts, affected))  # of few, NumPy looks for each on its own
    places = places[owners[places] != NO_OWNER]
    _, same, count = np.unique(texts[places], return_inverse=True, return_counts=True)
    return places, np.log(count[same]).astype(np.float32)


def _hashes(keys: Vectors) -> NDArray[np.int64]:
    odd = np.random.default_rng(0).integers(1, 2**62, keys.shape[1], dtype=np.int64) * 2 + 1
    hashes = np.zeros(len(keys), np.int64)
    for at in range(0, len(keys), _BLOCK):
        part = keys[at : at + _BLOCK] + np.float32(0)  # turns -0 into 0
        with np.errstate(over="ignore"):
            hashes[at : at + _BLOCK] = part.view(np.int32).astype(np.int64) @ odd
    return hashes
