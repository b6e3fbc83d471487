"""Readers of file formats: they yield rows of the file's own columns, with their place and text."""

from __future__ import annotations

import io
import json
import math
import re
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, time, timedelta
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from service.datasets.base import ReadProgress, open_compressed
from service.datasets.csv_files import MAX_COLUMNS, MAX_ROW, Dialect, EndlessRow, csv_records
from service.domain.errors import Invalid, Unavailable
from service.domain.records import parse_json

MAX_PARQUET_MEMORY = 1 << 30  # bytes for decoding a batch of rows; a page may decompress to more
_PARQUET_ROWS = 1_000  # decoded at once
_CHUNK = 1 << 18  # characters of a JSON array that are read at once
_TOKEN = re.compile(r"[^ \t\r\n]")
_DECODER = json.JSONDecoder()
_CUT = 16  # characters before the end of a text in which an error may come from the end
_STATUS = Path("/proc/self/status")  # of Linux; elsewhere decoding is not bounded


class Row(NamedTuple):
    """A row of a file, or why it cannot be read."""

    number: int  # of its first line, or in Parquet of the row, from 1
    text: str  # as it stands in the file; of Parquet, as JSON
    values: dict[str, Any] | Invalid


Rows = Iterator[Row]


def json_rows(path: Path, progress: ReadProgress) -> Rows:
    """Read JSON lines. Empty lines are skipped.

    Raises:
        Invalid: a line is longer than `MAX_ROW`, so that the next one cannot be found.
    """
    with open_compressed(path, progress) as file:
        number = 0
        while line := file.readline(MAX_ROW + 1):
            number += 1
            if len(line) > MAX_ROW:
                raise Invalid("", f"{path}, {EndlessRow(number).detail}")
            progress.read += len(line)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if not line.strip():
                continue
            yield Row(number, line.decode("utf-8", "replace"), _json_object(line))


def array_rows(path: Path, progress: ReadProgress) -> Rows:
    """Read a JSON array of objects, in the memory of one of them.

    Raises:
        Invalid: an object is larger than `MAX_ROW` or the array is damaged, so that the next one
            cannot be found.
    """
    number, is_next = 0, True
    with open_compressed(path, progress) as file:
        stream = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        text = stream.read(_CHUNK)
        at = text.index("[") + 1
        while True:
            token = _TOKEN.search(text, at)
            if token is None:
                text, at = stream.read(_CHUNK), 0
                if not text:
                    raise Invalid("", f"{path} ends early: the JSON array is not closed")
            elif token[0] == "]":
                return
            elif not is_next:
                if token[0] != ",":
                    problem = f"must be a comma or ], not {token[0]!r}"
                    raise Invalid("", f"{path}, behind row {number}: {problem}")
                at, is_next = token.end(), True
            else:
                number, is_next = number + 1, False
                try:
                    text, start, at = _whole_value(stream, text, token.start())
                except Invalid as error:
                    raise Invalid("", f"{path}, row {number}: {error.detail}") from None
                line = text[start:at].replace("\r", "").replace("\n", " ")
                progress.read += len(line)
                yield Row(number, line, _json_object(line))


def _whole_value(stream: io.TextIOWrapper, text: str, start: int) -> tuple[str, int, int]:
    """Read on until a JSON value at `start` is whole: the text, the value's start, its end.

    Raises:
        Invalid: there is no JSON value, or one of more than `MAX_ROW`.
    """
    while True:
        end = None
        try:
            _, end = _DECODER.raw_decode(text, start)
        except RecursionError:
            raise Invalid("", "must be JSON: it is nested too deep") from None
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Unterminated") and error.pos < len(text) - _CUT:
                place = f"at character {error.pos - start + 1}"
                raise Invalid("", f"must be JSON: {error.msg} {place}") from None
        if (len(text) if end is None else end) - start > MAX_ROW:
            raise Invalid("", f"is longer than {MAX_ROW:,} characters, the most that is allowed")
        if end is not None and end < len(text):  # so that a number is whole
            return text, start, end
        more = stream.read(max(_CHUNK, len(text) - start))
        if not more and end is not None:
            return text, start, end
        if not more:
            raise Invalid("", "must be JSON: the file ends within it")
        text, start = text[start:] + more, 0


def _json_object(text: bytes | str) -> dict[str, Any] | Invalid:
    """Parse an object, or return why it is none."""
    try:
        row = parse_json(text)
    except orjson.JSONDecodeError as error:
        place = f"at character {error.pos + 1}"
        return Invalid("", f"must be JSON: {error.msg.split(':')[0]} {place}")
    if not isinstance(row, dict):
        return Invalid("", f"must be a JSON object, not {type(row).__name__}")
    if len(row) > MAX_COLUMNS:
        return Invalid("", f"has {len(row):,} members; at most {MAX_COLUMNS:,} are allowed")
    return row


def csv_rows(path: Path, progress: ReadProgress, dialect: Dialect) -> Rows:
    """Read CSV whose first line names the columns: the header's row, then those of the records.

    The header's row has None for each column, in their order.

    Raises:
        Invalid: the header cannot be read.
    """
    with open_compressed(path, progress) as file:
        # Bytes of another encoding become lone surrogates, which the checks of records refuse row
        # by row.
        text = io.TextIOWrapper(file, dialect.encoding, errors="surrogateescape", newline="")
        header: list[str] | None = None
        records = csv_records(text, dialect.delimiter, quotes=dialect.quotes is not False)
        while True:
            try:
                number, line, cells = next(records)
            except StopIteration:
                return
            except EndlessRow as error:
                raise Invalid("", f"{path}, {error.detail}") from None
            progress.read += len(line)
            if header is not None:
                row = cells if isinstance(cells, Invalid) else dict(zip(header, cells, strict=True))
                yield Row(number, line, row)
            elif isinstance(cells, Invalid):
                raise Invalid("", f"{path}, line {number}: {cells.detail}")
            else:
                header = [name.strip() for name in cells]
                _check_distinct(path, header)
                yield Row(number, line, dict.fromkeys(header))


def parquet_rows(path: Path, progress: ReadProgress) -> Rows:
    """Read Parquet: a row with None for each column, then the rows.

    Null members of a struct are omitted.

    Raises:
        Unavailable: pyarrow is not installed; the message says how to install it.
        Invalid: the file is not Parquet, or damaged, or a column occurs twice, or decoding takes
            more than `MAX_PARQUET_MEMORY`.
    """
    progress.done, progress.total, progress.read = 0, path.stat().st_size, 0
    number = 0
    parquet = pyarrow_parquet(path, "reading")
    try:
        opened = parquet.ParquetFile(path, buffer_size=1 << 20)
    except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
        raise Invalid("", f"{path} cannot be read as Parquet: {error}") from error
    with opened as file:
        names = file.schema_arrow.names
        _check_distinct(path, names)
        yield Row(0, "", dict.fromkeys(names))
        batches = file.iter_batches(batch_size=_PARQUET_ROWS)
        while True:
            try:
                with _bounded_memory():
                    batch = next(batches, None)
                    if batch is None:
                        return
                    columns = [_decoded(column) for column in batch.columns]
            except MemoryError:
                raise Invalid(
                    "",
                    f"{path}, row {number + 1}: takes more than {MAX_PARQUET_MEMORY:,} bytes to "
                    f"decode {_PARQUET_ROWS:,} rows from here; write the file with shorter values "
                    "or smaller pages",
                ) from None
            for start, count, size in _slices(columns, len(batch)):
                if size > count * MAX_ROW:
                    number += 1
                    problem = f"has {size:,} bytes; a row may have at most {MAX_ROW:,}"
                    yield Row(number, "", Invalid("", problem))
                    continue
                values = [column.slice(start, count).to_pylist(maps_as_pydicts="strict")
                          for column in columns]  # fmt: skip
                for cells in zip(*values, strict=True):
                    number += 1
                    progress.read += size // count
                    row = dict(zip(names, map(_json_value, cells), strict=True))
                    yield Row(number, "", row)
            progress.done = progress.total * number // file.metadata.num_rows


def row_text(row: Row) -> str:
    """Return a row as a line of text, with its newline."""
    if row.text or isinstance(row.values, Invalid):
        return row.text if row.text.endswith(("\n", "\r")) else row.text + "\n"
    return orjson.dumps(row.values, default=str, option=orjson.OPT_APPEND_NEWLINE).decode()


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Raise `MemoryError` in the block once this process takes `MAX_PARQUET_MEMORY` more.

    The sizes that a file states for its decompressed pages may be wrong.
    """
    if not _STATUS.exists():
        yield
        return
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmData"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = 1024 * int(line.split()[1]) + MAX_PARQUET_MEMORY
    if resource.RLIM_INFINITY not in (soft, hard):
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _decoded(column: Any) -> Any:
    """Return a column with its dictionary decoded, and times that Python can represent."""
    arrow = import_module("pyarrow")
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if arrow.types.is_timestamp(column.type):
        # Python has no nanoseconds, and names of zones need a database: keep only the instant.
        zone = "UTC" if column.type.tz else None
        column = column.cast(arrow.timestamp("us", zone), safe=False)
    return column


def _slices(columns: list[Any], count: int) -> Iterator[tuple[int, int, int]]:
    """Yield slices of few bytes or of one row: start, rows, size."""
    waiting = [(0, count)] if count else []
    while waiting:
        start, count = waiting.pop()
        size = sum(_size(column.slice(start, count)) for column in columns)
        if size > MAX_ROW and count > 1:
            half = count // 2
            waiting += [(start + half, count - half), (start, half)]
        else:
            yield start, count, size


def _size(column: Any) -> int:
    """Return the bytes of a column, its nested values counted as Python objects."""
    arrow = import_module("pyarrow")
    types, parts = arrow.types, list[Any]()
    if types.is_struct(column.type):
        parts = column.flatten()
    elif types.is_map(column.type):
        offsets = column.offsets
        parts = [
            arrow.ListArray.from_arrays(offsets, inner).flatten()
            for inner in (column.keys, column.items)
        ]
    elif types.is_nested(column.type):  # a list
        parts = [column.flatten()]
    return int(column.nbytes) + sum(8 * len(part) + _size(part) for part in parts)


def _json_value(cell: Any) -> Any:
    """Return a cell as JSON has it, but for dates, whose zone is said elsewhere; NaN is absent."""
    if cell is None or isinstance(cell, str | int | date):
        return cell
    if isinstance(cell, float):
        return None if math.isnan(cell) else cell
    if isinstance(cell, dict):
        # Arrow gives every row all members of a struct, null where the row has none.
        members = ((member, _json_value(value)) for member, value in cell.items())
        return {member: value for member, value in members if value is not None}
    if isinstance(cell, list):
        return list(map(_json_value, cell))
    if isinstance(cell, Decimal):
        return int(cell) if cell.as_tuple().exponent == 0 else float(cell)
    if isinstance(cell, time):
        return cell.isoformat()
    if isinstance(cell, timedelta):
        return cell.total_seconds()
    if isinstance(cell, UUID):
        return str(cell)
    if isinstance(cell, bytes):  # texts of writers that do not say so
        with suppress(UnicodeDecodeError):
            return cell.decode()
    return cell


def pyarrow_parquet(path: Path, doing: str) -> Any:
    """Import `pyarrow.parquet`; `doing` is the verb of the error message, "reading" or "writing".

    Raises:
        Unavailable: pyarrow is not installed; the message says how to install it.
    """
    try:
        arrow = import_module("pyarrow")
        # The default allocator reserves a GiB beyond what it uses.
        arrow.set_memory_pool(arrow.system_memory_pool())
        return import_module("pyarrow.parquet")
    except ImportError:
        raise Unavailable(
            f"{path}: {doing} Parquet needs pyarrow; install it with: pip install 'heed[parquet]'"
        ) from None


def _check_distinct(path: Path, names: list[str]) -> None:
    if len(names) > MAX_COLUMNS:
        raise Invalid(
            "", f"{path}: has {len(names):,} columns; at most {MAX_COLUMNS:,} are allowed"
        )
    for name, count in Counter(names).items():
        if name and count > 1:
            raise Invalid("", f"{path}, column {name}: must not occur twice")
