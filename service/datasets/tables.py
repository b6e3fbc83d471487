"""Tables written to Parquet, CSV, TSV or JSON lines, by the suffix of the file."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import orjson

from service.datasets.base import compressed
from service.datasets.cells import escaped
from service.datasets.formats import pyarrow_parquet
from service.datasets.record_files import check_format
from service.domain.errors import Invalid
from service.runtime.durable_files import open_replacement

TableRows = Sequence[Sequence[Any]]  # one cell for each column
WriteRows = Callable[[TableRows], None]

_ARROW = {str: "string", int: "int32", float: "float32"}


def check_table(path: Path) -> None:
    """Check that a table can be written to a file, before there are rows to write.

    Raises:
        Invalid: the suffix is unknown, or the path is a directory's.
        Unavailable: the format is Parquet and pyarrow is not installed.
    """
    form, _ = check_format(path)
    if form == ".parquet":
        pyarrow_parquet(path, "writing")
    if path.is_dir():
        raise Invalid("", f"{path} is a directory")


@contextmanager
def open_table(
    path: Path, kinds: Mapping[str, type], metadata: Mapping[str, str]
) -> Iterator[WriteRows]:
    """Yield a function that writes rows to a table; each call makes one row group in Parquet.

    The file appears, complete and durable, when the block ends, and only then replaces an existing
    one; it is discarded if the block raises.

    Args:
        path: the file; its suffix selects the format and, except for Parquet, the compression.
        kinds: column name -> `str`, `int` (32 bits) or `float` (32 bits).
        metadata: written to Parquet's schema metadata; ignored by the other formats.

    Raises:
        Invalid: the suffix is unknown.
        Unavailable: the format is Parquet and pyarrow is not installed.
        StoreFull: the disk is full.
    """
    form, compression = check_format(path)
    if form == ".parquet":
        parquet = pyarrow_parquet(path, "writing")
        with open_replacement(path) as raw, _parquet(parquet, raw, kinds, metadata) as write:
            yield write
        return
    with open_replacement(path) as raw, compressed(raw, compression) as file:
        if form in (".csv", ".tsv"):
            text = codecs.getwriter("utf-8")(file)  # leaves the closing of the file to its owner
            delimiter = "," if form == ".csv" else "\t"
            # The writer quotes only its own line ends; a carriage return must be quoted too.
            ends = SimpleNamespace(write=lambda line: text.write(line.removesuffix("\r\n") + "\n"))
            lines = csv.writer(ends, delimiter=delimiter, lineterminator="\r\n")
            lines.writerow(kinds)
            yield lambda rows: lines.writerows(map(_cells, rows))
        else:
            yield lambda rows: file.writelines(_lines(kinds, rows))


@contextmanager
def _parquet(
    parquet: Any, raw: BinaryIO, kinds: Mapping[str, type], metadata: Mapping[str, str]
) -> Iterator[WriteRows]:
    arrow = import_module("pyarrow")
    fields = [
        arrow.field(name, getattr(arrow, _ARROW[kind])(), nullable=False)
        for name, kind in kinds.items()
    ]
    schema = arrow.schema(fields, metadata=dict(metadata))
    with parquet.ParquetWriter(raw, schema) as writer:

        def write(rows: TableRows) -> None:
            columns = list(zip(*rows, strict=True)) or [() for _ in kinds]
            writer.write_table(arrow.table(dict(zip(kinds, columns, strict=True)), schema=schema))

        yield write


def _cells(row: Sequence[Any]) -> list[Any]:
    return [escaped(cell) if isinstance(cell, str) else cell for cell in row]


def _lines(names: Iterable[str], rows: TableRows) -> Iterator[bytes]:
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        yield orjson.dumps(cells, option=orjson.OPT_APPEND_NEWLINE)
