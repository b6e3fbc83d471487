"""Readers of file formats: they yield `(number, row)`, a row of JSON values or an `Invalid`.

The number is that of the line, from 1 (of the first line where a quoted CSV cell spans several),
or in Parquet that of the row, from 1.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from service.datasets.base import ReadProgress, open_compressed
from service.datasets.rows import TEXT, RecordSchema
from service.domain.errors import Invalid, Unavailable

Rows = Iterator[tuple[int, dict[str, Any] | Invalid]]

MAX_LINE = 16 << 20  # bytes; a file without newlines must not fill the memory


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
            yield number, row


def csv_rows(path: Path, progress: ReadProgress, schema: RecordSchema[Any], delimiter: str) -> Rows:
    """Read CSV (RFC 4180) whose first line names the columns. Empty lines are skipped.

    Raises:
        Invalid: the header lacks a required field, or has an unknown or a duplicate one.
    """
    csv.field_size_limit(MAX_LINE)  # process-wide; the default of 128 KiB refuses long texts
    with open_compressed(path, progress) as file:
        # Invalid UTF-8 becomes lone surrogates, which the checks of records refuse row by row.
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
        except csv.Error as error:
            raise Invalid("", f"{path}, line 1: must be CSV: {error}") from error
        _check_columns(path, header, schema)
        while True:
            number = reader.line_num + 1
            row: dict[str, Any] | Invalid
            try:
                cells = next(reader, None)
                if cells is None:
                    return
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise Invalid("", f"has {len(cells)} cells, must have {len(header)}")
                row = schema.from_cells(dict(zip(header, cells, strict=True)))
            except csv.Error as error:
                row = Invalid("", f"must be CSV: {error}")
            except Invalid as error:
                row = error
            yield number, row


def parquet_rows(path: Path, progress: ReadProgress, schema: RecordSchema[Any]) -> Rows:
    """Read Parquet. Null members of a struct are omitted.

    Text in a column whose field has another type is parsed like a CSV cell.

    Raises:
        Unavailable: pyarrow is not installed; the message says how to install it.
        Invalid: the file is not Parquet, or damaged, or a column is missing, unknown or duplicate.
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
        _check_columns(path, names, schema)
        typed = [name for name in names if schema.fields[name] is not TEXT]
        for batch in file.iter_batches(batch_size=10_000):
            columns = [_values(column) for column in batch.columns]
            for cells in zip(*columns, strict=True):
                number += 1
                row = dict(zip(names, cells, strict=True))
                try:
                    for name in typed:
                        row[name] = _json_value(name, row[name], schema)
                except Invalid as error:
                    yield number, error
                else:
                    yield number, row
            progress.done = progress.total * number // file.metadata.num_rows


def _values(column: Any) -> list[Any]:
    arrow = import_module("pyarrow")
    if arrow.types.is_timestamp(column.type):
        # Python has no nanoseconds, and names of zones need a database: keep the instant alone.
        zone = "UTC" if column.type.tz else None
        column = column.cast(arrow.timestamp("us", zone), safe=False)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _json_value(name: str, cell: Any, schema: RecordSchema[Any]) -> Any:
    if isinstance(cell, str):
        return schema.from_cells({name: cell}).get(name)
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


def _check_columns(path: Path, names: list[str], schema: RecordSchema[Any]) -> None:
    try:
        schema.refuse_unknown(names)
        for name in schema.required:
            if name not in names:
                raise Invalid(f"/{name}", f"is required; there are {', '.join(names) or 'none'}")
        for name in names:
            if names.count(name) > 1:
                raise Invalid(f"/{name}", "must not occur twice")
    except Invalid as error:
        raise Invalid("", f"{path}, column {error.pointer[1:]}: {error.detail}") from None
