"""Records of CSV, against the csv module where they are whole."""

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from service.datasets.csv_files import MAX_LINES, csv_records
from service.domain.errors import Invalid

CELL = st.text(st.sampled_from('ab,;"\n\r é'), max_size=8)


@given(st.lists(st.lists(CELL, min_size=3, max_size=3).filter(any), min_size=1, max_size=8))
def test_whole_records_are_those_of_the_csv_module(rows: list[list[str]]) -> None:
    """Quotes, delimiters and line ends inside cells; the texts together are the file."""
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    text.seek(0)
    found = list(csv_records(text, ","))
    assert [cells for _, _, cells in found] == rows
    assert "".join(line for _, line, _ in found) == text.getvalue()
    start = 1
    for number, line, _ in found:
        assert number == start
        start += len(list(io.StringIO(line, newline="")))


def broken(text: str) -> list[tuple[int, str | None]]:
    """Line number of each record after the header, with its first cell, or None if it is bad."""
    records = list(csv_records(io.StringIO(text, newline=""), ";"))
    return [
        (number, None if isinstance(cells, Invalid) else cells[0])
        for number, _, cells in records[1:]
    ]


def test_a_broken_record_takes_no_other_along() -> None:
    """After a quote that is not closed, the records of the next lines are still there."""
    assert broken('a;b\n1;x\n2;"y\n3;z\n4;z\n') == [(2, "1"), (3, None), (4, "3"), (5, "4")]
    assert broken('a;b\n2;"y\n3;z\n4;"z\n5;z\n') == [(2, None), (3, "3"), (4, None), (5, "5")]
    assert broken('a;b\n2;"y\n\n3"\n4;z\n') == [(2, "2"), (5, "4")]
    assert broken("a;b\n1\n2;x;y\n\n3;z\n") == [(2, None), (3, None), (5, "3")]


def test_rows_without_a_value_are_skipped() -> None:
    """A spreadsheet writes delimiters for rows that were emptied, of any width."""
    assert broken("a;b\n1;x\n;\n2;\n;;\n\n") == [(2, "1"), (4, "2")]


def test_a_cell_of_very_many_lines_is_taken_for_an_open_quote() -> None:
    """The line with the quote is bad, and all others are read."""
    text = 'a;b\n0;"x\n' + "".join(f"{n};z\n" for n in range(1, 2 * MAX_LINES))
    found = broken(text)
    assert found[0] == (2, None)
    assert [first for _, first in found[1:]] == [str(n) for n in range(1, 2 * MAX_LINES)]
