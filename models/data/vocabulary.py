"""External id <-> row: the one id space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]


class Vocabulary:
    """Ids in row order. It only grows: a row, once given, means the same id for ever.

    A reader that remembers how long the vocabulary was still sees the same rows after it grew,
    so views of different lengths share one table.

    Raises:
        ValueError: when an id is given twice at construction.
    """

    __slots__ = ("_adding", "_ids", "_rows")

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ids: list[str] = list(ids)
        self._rows: dict[str, int] = {id_: row for row, id_ in enumerate(self._ids)}
        if len(self._rows) != len(self._ids):
            raise ValueError("a vocabulary's ids must be distinct")
        self._adding = Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._rows

    @property
    def ids(self) -> Sequence[str]:
        """All ids in row order."""
        return self._ids

    def id(self, row: int) -> str:
        """The id of a row.

        Raises:
            IndexError: for a row that was never given, negative rows included.
        """
        if row < 0:
            raise IndexError(f"no row {row}")
        return self._ids[row]

    def ids_of(self, rows: Iterable[int]) -> list[str]:
        """The ids of some rows, which were given."""
        ids = self._ids
        return [ids[row] for row in rows]

    def row(self, id_: str) -> int:
        """The row of an id, or -1."""
        return self._rows.get(id_, -1)

    def rows(self, ids: Sequence[str]) -> Rows:
        """The rows of ids, int32 [n]; -1 where an id is not known."""
        get = self._rows.get
        return np.array([get(id_, -1) for id_ in ids], dtype=np.int32)

    def add(self, id_: str) -> int:
        """The row of an id, given now if it had none."""
        row = self._rows.get(id_)
        if row is not None:
            return row
        with self._adding:  # another thread may have been faster
            row = self._rows.get(id_)
            if row is None:
                row = len(self._ids)
                # The id is in place before its row can be found by a concurrent reader.
                self._ids.append(id_)
                self._rows[id_] = row
            return row

    def copy(self) -> Vocabulary:
        """A vocabulary that grows on its own from here."""
        return Vocabulary(self._ids)
