"""Dialects of CSV files, against files that were written in them."""

import gzip
from pathlib import Path

import pytest

from service.datasets.csv_files import (
    check_encoding,
    detect_decimal,
    detect_delimiter,
    detect_encoding,
    detect_quotes,
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
        (["1,234", "0.5"], ",", "."),
        (["1.234", "0,123"], ",", ","),
        (["12.345", "3.1"], ";", "."),
        (["1,234", "3,50"], ",", ","),
        (["12345.678", "1.234"], ",", "."),
        (["7", "n/a"], ";", "."),
        ([], ";", "."),
    ],
)
def test_decimal_marks_are_those_of_the_numbers(
    cells: list[str], delimiter: str, mark: str
) -> None:
    """A mark that can be only of decimals or of groups decides, then the delimiter."""
    assert detect_decimal(cells, delimiter) == mark


@pytest.mark.parametrize("cells", [["1,234"], ["1.234", "7", "n/a"], ["€ 12,345"]])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_numbers_that_may_be_thousands_are_asked_about(cells: list[str], delimiter: str) -> None:
    """Three digits after every mark are no reason to prefer one reading."""
    with pytest.raises(Invalid, match=r"may be thousands or have decimals: --decimal"):
        detect_decimal(cells, delimiter)


PAIR = 'N1\tPlain\tu1\nN2\t"Untold story\tu2\nN3\tSecond\tu3\nN4\tThird%s\tu4\n'


@pytest.mark.parametrize(
    ("text", "delimiter", "quotes"),
    [
        ("id\ttitle\turl\n" + PAIR % "", "\t", False),  # a quote that is never closed
        ("id\ttitle\turl\n" + PAIR % '"', "\t", False),  # rows that a cell would swallow
        (("id\ttitle\turl\n" + PAIR % '"').replace("\t", ";"), ";", False),
        ('id\ttitle\nN1\t"Weird Al" Yankovic\n', "\t", False),
        ('id,title,by\n1,"Weird Al" Yankovic,a\n2,"Heroes" live,b\n', ",", False),
        ("id\ttitle\n" + "N1\tPlain\n" * 100_000 + 'N2\t"Untold\n', "\t", False),
        ('id\ttitle\nN1\t"Say ""hi"""\nN2\t"Two\ncells"\n', "\t", True),
        ('"id"\t"title"\n"N1"\t"One"\n"N2"\t"Two\n', "\t", True),
        ('id,title\n1,"a, b"\n2,"never closed\n', ",", True),
        ('id,title,by\n1,"one, more\nline, two",x\n', ",", True),
        ('id;title\n1;a\n2;"b\n', ";", True),  # a bad row, which says how to read it
        ('id,title\n1,"a"\n2,"b" c\n3,"d" e\n4,"f"\n', ",", True),
        ("id,title\n1,a\n", ",", None),
    ],
)
def test_quotes_enclose_cells_or_are_letters(
    tmp_path: Path, text: str, delimiter: str, quotes: bool | None
) -> None:
    """The reading in which more rows are whole is the one; a quote may be in the last row."""
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert detect_quotes(path, "utf-8-sig", delimiter) is quotes


def test_a_spreadsheet_names_the_delimiter_in_the_first_line(tmp_path: Path) -> None:
    """Although commas would give the rows more cells."""
    for line, delimiter in (("sep=;", ";"), ('"sep=|"\r', "|"), ("SEP=\t", "\t")):
        path = tmp_path / "a.csv"
        path.write_text(f"{line}\na{delimiter}b\n1,2,3{delimiter}4,5,6\n", newline="")
        assert detect_delimiter(path, "utf-8-sig", ",") == delimiter
