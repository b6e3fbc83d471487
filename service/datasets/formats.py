"""File formats: each gives `(number, row)`, the row as JSON values, or the `Invalid` that it is.

Numbers are lines, counted from 1 (where a quoted CSV cell spans several, the first), or rows,
counted from 1, in Parquet.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from service.datasets.base import Progress, opened
from service.datasets.rows import TEXT, Shape
from service.domain.errors import Invalid, Unavailable

Rows = Iterator[tuple[int, dict[str, Any] | Invalid]]

MAX_LINE = 16 << 20  # bytes: a file without newlines must not fill the memory


def json_rows(path: Path, progress: Progress) -> Rows:
    """Rows of JSON lines. Empty lines are passed over.

    Raises:
        Invalid: a line is longer than `MAX_LINE`; the rest cannot be told apart.
    """
    with opened(path, progress) as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise Invalid("", f"{path}, line {number}: must be shorter than {MAX_LINE} bytes")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # the mark that some editors put first
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                place = f"at character {error.pos + 1}"
                yield number, Invalid("", f"must be JSON: {error.msg.split(':')[0]} {place}")
            else:
                if isinstance(row, dict):
                    yield number, row
                else:
                    yield number, Invalid("", f"must be a JSON object, not {type(row).__name__}")


def csv_rows(path: Path, progress: Progress, shape: Shape[Any], delimiter: str) -> Rows:
    """Rows of CSV (RFC 4180) whose first line names the columns. Empty lines are passed over.

    Raises:
        Invalid: the header lacks a required field, or names an unknown one or one twice.
    """
    csv.field_size_limit(MAX_LINE)  # of the process: the module's own limit refuses long texts
    with opened(path, progress) as file:
        # What is not UTF-8 becomes lone surrogates, which the records' checks refuse row by row.
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
        except csv.Error as error:
            raise Invalid("", f"{path}, line 1: must be CSV: {error}") from error
        _check_columns(path, header, shape)
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader, None)
                if cells is None:
                    return
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise Invalid("", f"has {len(cells)} cells, must have {len(header)}")
                row = shape.from_cells(dict(zip(header, cells, strict=True)))
            except csv.Error as error:
                yield number, Invalid("", f"must be CSV: {error}")
            except Invalid as error:
                yield number, error
            else:
                yield number, row


def parquet_size(path: Path) -> int:
    """How many rows a Parquet file has.

    Raises:
        Unavailable: pyarrow is not installed; says how to install it.
        Invalid: the file is not Parquet, or damaged.
    """
    with _parquet(path) as file:
        return int(file.metadata.num_rows)


def parquet_rows(path: Path, progress: Progress, shape: Shape[Any]) -> Rows:
    """Rows of Parquet. Null members of a struct are left out.

    Where a column holds text and its field does not, its values are read as CSV cells.

    Raises:
        Unavailable, Invalid: as `parquet_size`; and when the columns are not the shape's.
    """
    progress.done, progress.total = 0, path.stat().st_size
    number = 0
    with _parquet(path) as file:
        names = file.schema_arrow.names
        _check_columns(path, names, shape)
        foreign = [name for name in names if shape.fields[name] is not TEXT]
        for batch in file.iter_batches(batch_size=10_000):
            columns = [_values(column) for column in batch.columns]
            for cells in zip(*columns, strict=True):
                number += 1
                row = dict(zip(names, cells, strict=True))
                try:
                    for name in foreign:
                        row[name] = _json_value(name, row[name], shape)
                except Invalid as error:
                    yield number, error
                else:
                    yield number, row
            progress.done = progress.total * number // file.metadata.num_rows


def _values(column: Any) -> list[Any]:
    arrow = import_module("pyarrow")
    if arrow.types.is_timestamp(column.type):
        # Python has no nanoseconds, and a zone's name needs a database: keep the instant only.
        zone = "UTC" if column.type.tz else None
        column = column.cast(arrow.timestamp("us", zone), safe=False)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _json_value(name: str, cell: Any, shape: Shape[Any]) -> Any:
    if isinstance(cell, str):
        return shape.from_cells({name: cell}).get(name)
    if isinstance(cell, dict):
        # Arrow gives each row every member of a struct, null where the row had none.
        return {member: value for member, value in cell.items() if value is not None}
    return cell


def pyarrow_parquet(path: Path, doing: str) -> Any:
    """The module that does Parquet; `doing` says what with this path, should it not be there.

    Raises:
        Unavailable: pyarrow is not installed; says how to install it.
    """
    try:
        return import_module("pyarrow.parquet")
    except ImportError:
        raise Unavailable(
            f"{path}: {doing} Parquet needs pyarrow; install it with: pip install 'heed[parquet]'"
        ) from None


def _parquet(path: Path) -> Any:
    parquet = pyarrow_parquet(path, "reading")
    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
        raise Invalid("", f"{path} cannot be read as Parquet: {error}") from error


def _check_columns(path: Path, names: list[str], shape: Shape[Any]) -> None:
    try:
        shape.refuse_unknown(names)
        for name in shape.required:
            if name not in names:
                raise Invalid(f"/{name}", f"is required; there are {', '.join(names) or 'none'}")
        for name in names:
            if names.count(name) > 1:
                raise Invalid(f"/{name}", "must not stand twice")
    except Invalid as error:
        raise Invalid("", f"{path}, column {error.pointer[1:]}: {error.detail}") from None
