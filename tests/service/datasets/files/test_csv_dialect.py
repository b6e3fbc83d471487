"""Dialects of CSV files, against files that were written in them."""

import gzip
from pathlib import Path

import pytest

from service.datasets.files.csv_dialect import (
    Dialect,
    check_encoding,
    detect_decimal,
    detect_delimiter,
    detect_encoding,
)
from service.domain.errors import Invalid

TEXTS = {
    "cp1252": "TEA SET £5 “café crème”\nWürfel groß\n",
    "latin-1": "CAFÉ CRÈME\nROSE À LA CRÈME BRÛLÉE £\n",
    "cp1250": "Zażółć gęślą jaźń\nŁódź, świeca\n",
    "cp1251": "Привет мир\nкнига для чтения\n",
    "cp1253": "Καλημέρα κόσμε\nβιβλίο\n",
    "shift_jis": "日本語のテキスト\n商品名\n",
    "gb18030": "中文商品名称\n蛋糕架\n",
    "utf-8": "naïve café\n",
    "utf-8-sig": "naïve café\n",
    "utf-16": "naïve café\n",
}


@pytest.mark.parametrize("encoding", TEXTS)
@pytest.mark.parametrize("size", [0, 3_000_000])
def test_texts_decode_as_they_were_written(tmp_path: Path, encoding: str, size: int) -> None:
    """Letters outside ASCII are read as they were written, also after megabytes without any."""
    text = "plain,1\n" * (size // 8) + TEXTS[encoding]
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(text.encode(encoding), 1))
    assert text.encode(encoding).decode(detect_encoding(path)) == text


def test_a_damaged_line_does_not_change_the_encoding(tmp_path: Path) -> None:
    """A file that is mostly UTF-8 stays so, with bytes that are none in one line."""
    path = tmp_path / "a.csv"
    path.write_bytes("naïve,1\n".encode() * 5 + b"caf\xe9,1\n" + b"plain\n" * 5)
    assert detect_encoding(path) == "utf-8-sig"


def test_encodings_are_checked_by_name() -> None:
    """A name that Python does not know is refused."""
    assert check_encoding("UTF8") == "utf-8-sig"
    assert check_encoding("latin-1") == "latin-1"
    for name in ("klingon", "base64"):
        with pytest.raises(Invalid, match=f"not '{name}'"):
            check_encoding(name)


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("a,b\n1,2\n", ","),
        ("a;b;c\n1,5;2,5;x, y\n", ";"),
        ("a\tb\nx, y\tz\n", "\t"),
        ("a|b\n1|2\n", "|"),
        ('a,b\n"x; y; z",1\n"p; q; r",2\n', ","),
        ("a;b\nx,y;1\nz;2\n", ";"),
        ('a;b\n"x;1\n' + "y;2\n" * 50_000, ";"),  # the quote is never closed
        ("alone\n1\n", ","),
        ("", ","),
    ],
)
def test_delimiters_are_those_of_the_cells(tmp_path: Path, text: str, delimiter: str) -> None:
    """The delimiter splits all rows into as many cells as the header."""
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert detect_delimiter(path, "utf-8-sig", ",") == delimiter


@pytest.mark.parametrize(
    ("cells", "delimiter", "mark"),
    [
        (["3,50", "1"], ",", ","),
        (["€ 3,50", "-£1,5"], ",", ","),
        (["3.50", "1,000.5", "7"], ";", "."),
        (["1.234,5", "2.000"], ",", ","),
        (["1,234"], ",", "."),
        (["1,234"], ";", ","),
        (["7", "n/a"], ";", "."),
        ([], ";", "."),
    ],
)
def test_decimal_marks_are_those_of_the_numbers(
    cells: list[str], delimiter: str, mark: str
) -> None:
    """What can be only one of a decimal and a group decides, then the delimiter."""
    assert detect_decimal(cells, delimiter) == mark


def test_a_dialect_is_said_in_words() -> None:
    """As it is printed before an import."""
    assert str(Dialect()) == "UTF-8, commas"
    assert str(Dialect("cp1252", ";", ",")) == "cp1252, semicolons, decimal commas"
