"""Rows of one item, or of one user, in one file, put together into one record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from service.datasets.files.cells import shortened
from service.domain.errors import Invalid
from service.domain.records import MAX_LABELS

_EXAMPLES = 5


class RepeatedRows:
    """Unites the fields of several rows of one record, and collects what cannot be united.

    Lists unite in the order of the rows, and objects member by member. Of another field, the first
    value that is not blank stays, and later ones that differ from it are counted.
    """

    def __init__(self) -> None:
        self.rows = 0  # that were put into the record of an earlier row
        self.differing = 0  # values that were left out, since an earlier row has another
        self._examples: dict[tuple[str, str], list[Any]] = {}

    def unite(self, record: str, first: dict[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of both.

        Raises:
            Invalid: a list would become too long; nothing was changed or counted then.
        """
        left_out: list[tuple[str, Any, Any]] = []
        united = _united_members("", first, later, left_out)
        self.rows += 1
        self.differing += len(left_out)
        for name, kept, value in left_out:
            values = self._examples.get((record, name))
            if values is None and len(self._examples) < _EXAMPLES:
                values = self._examples[record, name] = [kept]
            if values is not None and len(values) < _EXAMPLES:
                values.append(value)
        return united

    def warning(self) -> str | None:
        """Return a sentence about the values that were left out; None if there are none."""
        if not self.differing:
            return None
        examples = ", ".join(
            f"{record!r} {name} {' then '.join(map(shortened, values))}"
            for (record, name), values in self._examples.items()
        )
        more = ", …" if self.differing > sum(len(v) - 1 for v in self._examples.values()) else ""
        return (
            f"values left out, since an earlier row of the id has another: {self.differing:,}: "
            f"{examples}{more}; to keep the last value, sort the file so that its row comes first"
        )


def _united_members(
    path: str, first: Mapping[str, Any], later: Mapping[str, Any], left_out: list[Any]
) -> dict[str, Any]:
    united = dict(first)
    for name, value in later.items():
        kept = first.get(name)
        inner = f"{path}{name}"
        if is_blank(value):
            united.setdefault(name, value)
        elif is_blank(kept):
            united[name] = value
        elif isinstance(kept, Mapping) and isinstance(value, Mapping):
            united[name] = _united_members(f"{inner}.", kept, value, left_out)
        elif isinstance(kept, list | tuple) and isinstance(value, list | tuple):
            more = [member for member in value if member not in kept]
            if not path and len(kept) + len(more) > MAX_LABELS:
                raise Invalid(
                    f"/{name}",
                    f"has {len(kept) + len(more):,} entries with those of earlier rows of this id; "
                    f"at most {MAX_LABELS:,} are allowed",
                )
            united[name] = type(kept)([*kept, *more]) if more else kept
        elif not (np.array_equal(kept, value) if isinstance(kept, np.ndarray) else kept == value):
            left_out.append((inner, kept, value))
    return united


def is_blank(value: Any) -> bool:
    """Report whether a field has no value: absent, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)
