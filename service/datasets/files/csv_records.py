"""Records of CSV text, found again after a record that is broken."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator
from typing import TextIO

from service.domain.errors import Invalid

MAX_ROW = 4 << 20  # characters in CSV, bytes in JSON and Parquet: bounds memory
MAX_COLUMNS = 16_384  # as many as a spreadsheet has
MAX_LINES = 1_000  # of one record; more are taken for a quote that was never closed


# The first line by which a spreadsheet is told the delimiter; it is no row.
_SEPARATOR = re.compile(r'"?sep=([^\r\n])"?\s*', re.IGNORECASE)


class EndlessRow(Invalid):
    """A line is longer than a row may be, so that the next one cannot be found."""

    def __init__(self, number: int) -> None:
        super().__init__(
            "", f"line {number}: is longer than {MAX_ROW:,} bytes, which a row may have at most"
        )


class _Lines:
    """Lines of a text, which the reader of a record takes and may have to give back."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._returned: deque[str] = deque()
        self.taken: list[str] = []  # by the current record
        self.size = 0  # their characters
        self.number = 1  # line number of the first

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if len(self.taken) == MAX_LINES:
            raise csv.Error(f"a cell has more than {MAX_LINES:,} lines: is a quote not closed?")
        line = self._returned.popleft() if self._returned else self._text.readline(MAX_ROW + 1)
        if not line:
            raise StopIteration
        if len(line) > MAX_ROW:
            raise EndlessRow(self.number + len(self.taken))
        self.taken.append(line)
        self.size += len(line)
        if self.size > MAX_ROW:
            raise csv.Error(
                f"a row has more than {MAX_ROW:,} characters, the most that is allowed: is a quote "
                "not closed?"
            )
        return line

    def next_record(self) -> None:
        """Forget the lines of the current record."""
        self.number += len(self.taken)
        self.size = 0
        self.taken.clear()

    def skip_separator(self) -> None:
        """Skip a first line that only names the delimiter."""
        first = next(self, "")
        if separator(first) is None:
            self._returned.extend(self.taken)
            self.taken.clear()
            self.size = 0
        else:
            self.next_record()

    def give_back_all_but_first(self) -> None:
        self._returned.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]


def separator(line: str) -> str | None:
    """Return the delimiter that a first line such as `sep=;` names; None for another line."""
    named = _SEPARATOR.fullmatch(line)
    return None if named is None else named[1]


def csv_records(
    text: TextIO, delimiter: str, *, quotes: bool = True
) -> Iterator[tuple[int, str, list[str] | Invalid]]:
    """Read records by RFC 4180: the number of their first line, from 1, their text, their cells.

    The first record is the header, and every other one must have as many cells. Empty lines are
    skipped, and a first line such as `sep=;`. Where a record of several lines is broken, its first
    line alone is bad: a quote that is not closed would take the records after it along. Without
    `quotes` every line is a record, and quotation marks are letters.

    Raises:
        EndlessRow: a line is longer than `MAX_ROW`.
    """
    csv.field_size_limit(MAX_ROW)  # process-wide; the default of 128 KiB refuses long texts
    lines = _Lines(text)
    reader = csv.reader(
        lines,
        delimiter=delimiter,
        strict=True,
        quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
    )
    lines.skip_separator()
    width = None
    while True:
        cells: list[str] | Invalid | None
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if cells and len(cells) > MAX_COLUMNS:
                raise Invalid("", f"has {len(cells):,} cells; at most {MAX_COLUMNS:,} are allowed")
            if cells and width is not None and len(cells) != width:
                raise Invalid("", f"has {len(cells)} cells, must have {width}")
        except EndlessRow:
            raise
        except csv.Error as error:
            hint = "; --no-quotes reads quotation marks as letters" if quotes else ""
            cells = Invalid("", f"must be CSV: {error}{hint}")
        except Invalid as error:
            cells = error
        if isinstance(cells, Invalid):
            lines.give_back_all_but_first()
        if cells:
            yield lines.number, "".join(lines.taken), cells
            width = len(cells) if width is None and not isinstance(cells, Invalid) else width
        lines.next_record()
