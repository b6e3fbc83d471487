"""Maps external ids to row numbers and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from threading import Lock

import numpy as np
from numpy.typing import NDArray


class Vocabulary:
    """Append-only list of ids: an id keeps its row for ever.

    A reader that remembers the length still sees the same rows after the vocabulary grew, so
    views of different lengths share one table.

    Raises:
        ValueError: for a duplicate id at construction.
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
        """Return the id of a row. Raises IndexError for one that is negative or not assigned."""
        if row < 0:
            raise IndexError(f"no row {row}")
        return self._ids[row]

    def ids_of(self, rows: Iterable[int]) -> list[str]:
        """Return the ids of assigned rows."""
        ids = self._ids
        return [ids[row] for row in rows]

    def row(self, id_: str) -> int:
        """Return the row of an id, or -1."""
        return self._rows.get(id_, -1)

    def rows(self, ids: Sequence[str]) -> NDArray[np.int32]:
        """Return the rows of ids, int32 [n]; -1 for an unknown id."""
        return np.fromiter(map(self._rows.get, ids, repeat(-1)), np.int32, len(ids))

    def extend(self, ids: Iterable[str]) -> None:
        """Assign the next rows to the ids that are new, in their order."""
        known, wanted = self._rows, dict.fromkeys(ids)
        with self._adding:
            new = [id_ for id_ in wanted if id_ not in known]
            first = len(self._ids)
            # Append first: a concurrent reader that finds the row must find its id too.
            self._ids.extend(new)
            known.update(zip(new, range(first, first + len(new)), strict=True))

    def add(self, id_: str) -> int:
        """Return the row of an id, assigning the next one if it is new."""
        row = self._rows.get(id_)
        if row is not None:
            return row
        with self._adding:  # another thread may have added it meanwhile
            row = self._rows.get(id_)
            if row is None:
                row = len(self._ids)
                # Append first: a concurrent reader that finds the row must find its id too.
                self._ids.append(id_)
                self._rows[id_] = row
            return row
