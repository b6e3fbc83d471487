"""CSV: records of rows that may be broken, and the dialect, found out by looking."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

import charset_normalizer

from service.datasets.base import ReadProgress, open_compressed
from service.datasets.cells import Decimal, decimal_mark, has_two_readings
from service.domain.errors import Invalid

MAX_ROW = 4 << 20  # characters in CSV, bytes in JSON and Parquet: bounds memory
MAX_COLUMNS = 16_384  # as many as a spreadsheet has
MAX_LINES = 1_000  # of one record; more are taken for a quote that was never closed


# The first line that tells a spreadsheet the delimiter; it is no row.
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

    The first record is the header, and every other one must have as many cells. Lines without a
    value are skipped, and a first line such as `sep=;`. If a record of several lines is broken,
    only its first line is bad: a quote that is not closed would take the records after it along.
    Without `quotes` every line is a record, and quotation marks are letters.

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
            if not any(cells):  # such as ;; which spreadsheets write behind the last row
                cells = []
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


DELIMITERS = (",", ";", "\t", "|")
_SAMPLE = 1 << 18  # bytes from which the delimiter is found
_FOREIGN = 1 << 16  # bytes of lines outside ASCII, from which the encoding is found
_BLOCK = 1 << 20
_DECIDED = 100  # more rows for quoted cells than against them decide
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Encodings in which shops export, the most common first.
_ENCODINGS = ["cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "shift_jis", "gb18030", "big5"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Encoding, delimiter, decimal mark and quoting of a CSV file."""

    encoding: str = "utf-8-sig"
    delimiter: str = ","
    decimal: Decimal = "."
    quotes: bool | None = None  # whether cells may be quoted; None in a file without a quote

    def __str__(self) -> str:
        names = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
        encoding = "UTF-8" if self.encoding == "utf-8-sig" else self.encoding
        between = names.get(self.delimiter, repr(self.delimiter))
        mark = ", decimal commas" if self.decimal == "," else ""
        quotes = {None: "", True: ", quoted cells", False: ", no quoted cells"}[self.quotes]
        return f"{encoding}, {between}{mark}{quotes}"


def detect_encoding(path: Path) -> str:
    """Return the encoding of a text file: its byte order mark's, UTF-8 if all of it is, or a guess.

    The whole file is read, since the first letter outside ASCII may be the last of it.

    Raises:
        Invalid: the bytes are of no encoding that is known here.
    """
    decoder, foreign, valid = codecs.getincrementaldecoder("utf-8")(), bytearray(), True
    with open_compressed(path, ReadProgress()) as file:
        first = file.read(_BLOCK)
        for mark, name in _BOMS:
            if first.startswith(mark):
                return name
        block, endless = first, 0
        while block and (valid or len(foreign) < _FOREIGN):
            # Reading ends at a line that is too long.
            endless = 0 if b"\n" in block or b"\r" in block else endless + len(block)
            if endless > 4 * MAX_ROW:
                break
            if not block.isascii() or decoder.getstate()[0]:
                if len(foreign) < _FOREIGN:
                    lines = block.split(b"\n")
                    foreign += b"\n".join(line for line in lines if not line.isascii()) + b"\n"
                valid = valid and _decodes(decoder, block)
            block = file.read(_BLOCK)
    if valid and _decodes(decoder, b"", final=True):
        return "utf-8-sig"
    sample = bytes(foreign[:_FOREIGN])
    lines = [line for line in sample.splitlines() if line]
    if 2 * sum(_is_utf_8(line) for line in lines) > len(lines):
        return "utf-8-sig"  # with some damaged lines
    found = charset_normalizer.from_bytes(sample, cp_isolation=_ENCODINGS, threshold=1.0)
    least = min((match.chaos for match in found), default=0.0)
    likely = {
        name for match in found if match.chaos == least for name in match.could_be_from_charset
    }
    for name in _ENCODINGS:  # of those that make the text equally plausible, the most common
        if name in likely:
            return name
    raise Invalid("", f"{path} is not UTF-8: give --encoding, such as latin-1")


def check_encoding(name: str) -> str:
    """Return the name of an encoding that reads text; raises `Invalid` for another."""
    try:
        "".encode(name)
    except (LookupError, UnicodeError):
        raise Invalid("", f"--encoding must be such as utf-8 or latin-1, not {name!r}") from None
    return "utf-8-sig" if codecs.lookup(name).name == "utf-8" else name


def detect_delimiter(path: Path, encoding: str, preferred: str) -> str:
    """Return the delimiter that gives the first rows the most cells, all the same number.

    A first line such as `sep=;` decides. If none gives more than one cell, the `preferred` is
    returned. A row that is broken, such as by a quote that is not closed, speaks against a
    delimiter as one row.
    """
    with open_compressed(path, ReadProgress()) as file:
        text = _sample(file, encoding)
    if named := separator(text.partition("\n")[0]):
        return named
    scores = {}
    for delimiter in dict.fromkeys((preferred, *DELIMITERS)):
        records = csv_records(io.StringIO(text, newline=""), delimiter)
        widths = [0 if isinstance(cells, Invalid) else len(cells) for _, _, cells in records]
        if widths and widths[0] > 1:
            scores[delimiter] = (widths.count(widths[0]) / len(widths)) * widths[0]
    return max(scores, key=scores.__getitem__, default=preferred)


def detect_quotes(path: Path, encoding: str, delimiter: str) -> bool | None:
    """Report whether quotes enclose cells, or are letters of them; None in a file without a quote.

    The whole file is read. Rows that are whole only when quotes are letters speak against quoted
    cells: rows that are broken otherwise, and lines that one quoted cell would swallow though each
    has as many cells as the header. Rows that are whole only when quotes enclose cells speak for
    them. Between tabs quoted cells are rare; elsewhere a single broken row is a bad row, and cells
    that a pair of quotes encloses speak for quotes too.
    """
    with open_compressed(path, ReadProgress()) as file:
        if not any(b'"' in block for block in iter(lambda: file.read(_BLOCK), b"")):
            return None
    rows = broken = swallowed = quoted = enclosed = 0
    width = None
    with open_compressed(path, ReadProgress()) as file:
        text = io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")
        records = csv_records(text, delimiter)
        while quoted <= _DECIDED + broken + swallowed:
            try:
                _, record, cells = next(records)
            except (StopIteration, EndlessRow):  # reading ends at a line that is too long
                break
            lines = [line.split(delimiter) for line in re.split(r"\r\n?|\n", record) if line]
            width = len(lines[0]) if width is None else width
            rows += len(lines)
            if '"' not in record:
                continue
            whole = sum(_is_whole(line, width, delimiter) for line in lines)
            if isinstance(cells, Invalid):
                broken += whole
            elif 2 * whole <= len(lines):
                quoted += 1
            elif len(lines) > 1:
                swallowed += 1
            else:
                marks = [cell for cell in lines[0] if cell[:1] == '"' == cell[-1:] != cell]
                quoted += any('""' in cell[1:-1] for cell in marks)
                enclosed += bool(marks)
    if delimiter == "\t":
        return broken + swallowed <= quoted or 2 * enclosed >= rows
    return broken + swallowed <= quoted + enclosed or (broken == 1 and not swallowed)


def _is_whole(cells: list[str], width: int, delimiter: str) -> bool:
    """Report whether a line is a row; in prose a comma is followed by a space."""
    spaced = delimiter != "\t" and any(cell[:1] == " " for cell in cells)
    return len(cells) == width and not spaced


def detect_decimal(cells: Iterable[str], delimiter: str) -> Decimal:
    """Return the decimal mark of cells that are numbers, "." or ",".

    As many with each leave it to the delimiter: semicolons between the cells speak for a comma.

    Raises:
        Invalid: the mark of every number is before three digits, as in 1,234.
    """
    votes, texts = Counter[Decimal](), list(cells)
    for cell in texts:
        if (mark := decimal_mark(cell)) is not None:
            votes[mark] += 1
    unclear = None if votes else next(filter(has_two_readings, texts), None)
    if unclear is not None:
        way = "--decimal . or --decimal , says which mark is that of decimals"
        raise Invalid("", f"numbers such as {unclear!r} may be thousands or have decimals: {way}")
    if votes["."] == votes[","]:
        return "," if delimiter == ";" and any("," in text for text in texts) else "."
    return max(votes, key=votes.__getitem__)


def _sample(file: BinaryIO, encoding: str) -> str:
    data = file.read(_SAMPLE)
    text = data.decode(encoding, errors="ignore")
    # The last line may be incomplete.
    return text if len(data) < _SAMPLE else text[: text.rfind("\n") + 1]


def _is_utf_8(line: bytes) -> bool:
    return _decodes(codecs.getincrementaldecoder("utf-8")(), line, final=True)


def _decodes(decoder: codecs.IncrementalDecoder, block: bytes, *, final: bool = False) -> bool:
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError:
        return False
    return True
