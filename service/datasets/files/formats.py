"""Readers of file formats: they yield rows of the file's own columns, with their place and text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from service.datasets.base import ReadProgress, open_compressed
from service.datasets.files.csv_dialect import Dialect
from service.datasets.files.csv_records import csv_records
from service.domain.errors import Invalid, Unavailable

MAX_LINE = 16 << 20  # bytes; a file without newlines must not fill the memory


class Row(NamedTuple):
    """A row of a file, or why it cannot be read."""

    number: int  # of its first line, or in Parquet of the row, from 1
    text: str  # as it stands in the file; of Parquet, as JSON
    values: dict[str, Any] | Invalid


Rows = Iterator[Row]


def json_rows(path: Path, progress: ReadProgress) -> Rows:
    """Read JSON lines. Empty lines are skipped.

    Raises:
        Invalid: a line is longer than `MAX_LINE`, so that the next one cannot be found.
    """
    with open_compressed(path, progress) as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise Invalid("", f"{path}, line {number}: must be shorter than {MAX_LINE} bytes")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
                if not isinstance(row, dict):
                    row = Invalid("", f"must be a JSON object, not {type(row).__name__}")
            except orjson.JSONDecodeError as error:
                place = f"at character {error.pos + 1}"
                row = Invalid("", f"must be JSON: {error.msg.split(':')[0]} {place}")
            yield Row(number, line.decode("utf-8", "replace"), row)


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
        for number, line, cells in csv_records(text, dialect.delimiter):
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
        Invalid: the file is not Parquet, or damaged, or a column occurs twice.
    """
    progress.done, progress.total = 0, path.stat().st_size
    number = 0
    parquet = pyarrow_parquet(path, "reading")
    try:
        opened = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
        raise Invalid("", f"{path} cannot be read as Parquet: {error}") from error
    with opened as file:
        names = file.schema_arrow.names
        _check_distinct(path, names)
        yield Row(0, "", dict.fromkeys(names))
        for batch in file.iter_batches(batch_size=10_000):
            columns = [_values(column) for column in batch.columns]
            for cells in zip(*columns, strict=True):
                number += 1
                row = dict(zip(names, map(_json_value, cells), strict=True))
                yield Row(number, "", row)
            progress.done = progress.total * number // file.metadata.num_rows


def row_text(row: Row) -> str:
    """Return a row as a line of text, with its newline."""
    if row.text or isinstance(row.values, Invalid):
        return row.text if row.text.endswith(("\n", "\r")) else row.text + "\n"
    return orjson.dumps(row.values, default=str, option=orjson.OPT_APPEND_NEWLINE).decode()


def _values(column: Any) -> list[Any]:
    arrow = import_module("pyarrow")
    if arrow.types.is_timestamp(column.type):
        # Python has no nanoseconds, and names of zones need a database: keep the instant alone.
        zone = "UTC" if column.type.tz else None
        column = column.cast(arrow.timestamp("us", zone), safe=False)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _json_value(cell: Any) -> Any:
    if isinstance(cell, dict):
        # Arrow gives every row all members of a struct, null where the row has none.
        return {member: value for member, value in cell.items() if value is not None}
    return cell


def pyarrow_parquet(path: Path, doing: str) -> Any:
    """Import `pyarrow.parquet`; `doing` is the verb of the error message, "reading" or "writing".

    Raises:
        Unavailable: pyarrow is not installed; the message says how to install it.
    """
    try:
        return import_module("pyarrow.parquet")
    except ImportError:
        raise Unavailable(
            f"{path}: {doing} Parquet needs pyarrow; install it with: pip install 'heed[parquet]'"
        ) from None


def _check_distinct(path: Path, names: list[str]) -> None:
    for name in names:
        if name and names.count(name) > 1:
            raise Invalid("", f"{path}, column {name}: must not occur twice")
