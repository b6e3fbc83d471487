"""Tables that the service writes: equal rows in every format, and no partial file."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.datasets.record_files import EventsFile
from service.datasets.tables import open_table
from service.domain.errors import Invalid, Unavailable

KINDS = {"user_id": str, "rank": int, "score": float}
ROWS = [
    ("ann", 1, float(np.float32(0.1))),
    ('naïve, "quoted"\nid', 2, -1e-30),
    ("", 2**31 - 1, 1e30),
]


def write(path: Path, *groups: list[tuple[Any, ...]]) -> None:
    with open_table(path, KINDS, {"heed.model_version": "v1"}) as rows:
        for group in groups:
            rows(group)


def test_parquet_keeps_types_groups_and_metadata(tmp_path: Path) -> None:
    """Strings and 32 bits of integers and floats, none null; what is written at once is a group."""
    write(tmp_path / "x.parquet", ROWS[:2], ROWS[2:])
    file = pq.ParquetFile(tmp_path / "x.parquet")
    assert [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)] == [2, 1]
    schema = file.schema_arrow
    assert schema.metadata[b"heed.model_version"] == b"v1"
    assert schema.names == list(KINDS)
    assert schema.types == [pa.string(), pa.int32(), pa.float32()]
    assert not any(field.nullable for field in schema)
    read = [tuple(row.values()) for row in file.read().to_pylist()]
    assert read == [(user, rank, float(np.float32(score))) for user, rank, score in ROWS]


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
@pytest.mark.parametrize("form", [".csv", ".tsv", ".jsonl", ".ndjson"])
def test_text_formats_hold_every_digit(tmp_path: Path, form: str, packing: str) -> None:
    path = tmp_path / f"x{form}{packing}"
    write(path, ROWS[:1], [], ROWS[1:])
    content = path.read_bytes()
    if packing:
        content = (gzip if packing == ".gz" else lzma).decompress(content)
    if form in (".csv", ".tsv"):
        text = content.decode().splitlines(keepends=True)
        header, *cells = csv.reader(text, delimiter="," if form == ".csv" else "\t", strict=True)
        assert header == list(KINDS)
        read = [(user, int(rank), float(score)) for user, rank, score in cells]
    else:
        lines = [json.loads(line) for line in content.splitlines()]
        assert all(list(line) == list(KINDS) for line in lines)
        read = [tuple(line.values()) for line in lines]
    assert read == ROWS


@pytest.mark.parametrize("name", ["x.parquet", "x.tsv.xz"])
@pytest.mark.parametrize("before", [None, b"as it was"])
def test_interrupted_write_leaves_the_old_file(
    tmp_path: Path, name: str, before: bytes | None
) -> None:
    path = tmp_path / name
    if before is not None:
        path.write_bytes(before)

    def break_off() -> None:
        with open_table(path, KINDS, {}) as rows:
            rows(ROWS)
            assert path.exists() == (before is not None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert [entry.name for entry in tmp_path.iterdir()] == ([name] if before else [])
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("name", ["x", "x.json", "x.parquet.gz", "x.csv.zip", ".csv"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Invalid, match=r"must end in one of .*\.csv"):
        write(tmp_path / name, ROWS)
    assert list(tmp_path.iterdir()) == []


def test_parquet_without_pyarrow_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(Unavailable, match=r"writing Parquet .*pip install 'heed\[parquet\]'"):
        write(tmp_path / "x.parquet", ROWS)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "x.csv", ROWS)


@pytest.mark.parametrize("form", [".csv", ".tsv"])
def test_no_cell_is_a_formula_and_an_import_reads_the_same_texts(tmp_path: Path, form: str) -> None:
    """Spreadsheets compute what begins with = + - @, a tab or a carriage return."""
    begins = ["=", "+", "-", "@", "\t", "\r", "'=", "''-", "'", "a=", "\t=", "\r@"]
    ids = [f"{begin}cmd|' /C calc'!A0" for begin in begins] + ["-5", "+1.5e3", "'-5", "007", "=1"]
    path = tmp_path / f"x{form}"
    kinds = {"user_id": str, "item_id": str, "weight": float}
    with open_table(path, kinds, {}) as rows:
        rows([(user, item, 0.5) for user, item in zip(ids, reversed(ids), strict=True)])
        rows([("a", "b", 1e-7)])
    with path.open(newline="") as file:
        _, *cells = csv.reader(file, delimiter="," if form == ".csv" else "\t", strict=True)
    texts = [cell for row in cells for cell in row]
    assert {text for text in texts if text[0] in "=+-@\t\r"} == {"-5", "+1.5e3"}
    events = list(EventsFile(path).events())
    assert [(e.user_id, e.item_id) for e in events[:-1]] == [*zip(ids, reversed(ids), strict=True)]
    assert events[-1].weight == 1e-7
