"""Records of CSV text, found again after a record that is broken."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator

from service.domain.errors import Invalid

MAX_FIELD = 16 << 20  # characters; a file without newlines must not fill the memory
MAX_LINES = 1_000  # of one record; more are taken for a quote that was never closed


class _Lines:
    """Lines of a text, which the reader of a record takes and may have to give back."""

    def __init__(self, text: Iterator[str]) -> None:
        self._text = text
        self._returned: deque[str] = deque()
        self.taken: list[str] = []  # by the current record

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if len(self.taken) == MAX_LINES:
            raise csv.Error(f"a cell has more than {MAX_LINES:,} lines: is a quote not closed?")
        line = self._returned.popleft() if self._returned else next(self._text)
        self.taken.append(line)
        return line

    def give_back_all_but_first(self) -> None:
        self._returned.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]


def csv_records(
    text: Iterator[str], delimiter: str
) -> Iterator[tuple[int, str, list[str] | Invalid]]:
    """Read records by RFC 4180: the number of their first line, from 1, their text, their cells.

    The first record is the header, and every other one must have as many cells. Empty lines are
    skipped. Where a record of several lines is broken, its first line alone is bad: a quote that is
    not closed would take the records after it along.
    """
    csv.field_size_limit(MAX_FIELD)  # process-wide; the default of 128 KiB refuses long texts
    lines = _Lines(text)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    number, width = 1, None
    while True:
        cells: list[str] | Invalid | None
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if cells and width is not None and len(cells) != width:
                raise Invalid("", f"has {len(cells)} cells, must have {width}")
        except csv.Error as error:
            cells = Invalid("", f"must be CSV: {error}")
        except Invalid as error:
            cells = error
        if isinstance(cells, Invalid):
            lines.give_back_all_but_first()
        if cells:
            yield number, "".join(lines.taken), cells
            width = len(cells) if width is None and not isinstance(cells, Invalid) else width
        number += len(lines.taken)
        lines.taken.clear()
