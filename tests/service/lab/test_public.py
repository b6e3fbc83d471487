"""PyVideo and Online Retail, on a few lines in their formats."""

import gzip
import json
import lzma
from collections.abc import Mapping
from pathlib import Path

import pytest

from service.domain.errors import Invalid
from service.domain.records import Event, Item, check_each, check_event, check_item
from service.lab.public_data import ItemSequences, OnlineRetail, PyVideo

TALK = {
    "doc_id": "pycon-2014/monads",
    "event": "pycon-2014",
    "event_title": "PyCon 2014",
    "title": " Monads ",
    "description": "Boxes.",
    "summary": "",
    "tags": ["fp", " types", "fp", " "],
    "speakers": ["Ada", " "],
    "language": "eng",
    "recorded": "2014-04-09",
    "duration": 1322,
    "youtube_id": "abc",
    "url": "https://www.youtube.com/watch?v=abc",
    "copyright_text": None,
}

SALES = """\
invoice,item_id,title,quantity,timestamp,unit_price,user_id,country
1,85123A,WHITE LANTERN,6,2010-12-01 08:26:00,2.55,17850,United Kingdom
1,71053,"CLOCK, RED",2880,2010-12-01 08:26:00,3.39,17850,United Kingdom
1,71053,"CLOCK, RED",2880,2010-12-01 08:26:00,3.39,17850,United Kingdom
2,POST,POSTAGE,1,2010-12-02 09:00:00,18.0,12583,France
2,85123A,CREAM LANTERN,6,2010-12-02 09:00:00,2.55,12583,France
"""


def talks(path: Path, *changes: Mapping[str, object]) -> PyVideo:
    with gzip.open(path / "videos.jsonl.gz", "wt", encoding="utf-8") as file:
        for change in changes:
            file.write(json.dumps({**TALK, **change}) + "\n")
    return PyVideo(path)


def sales(path: Path, text: str = SALES) -> OnlineRetail:
    (path / "purchases.csv.xz").write_bytes(lzma.compress(text.encode()))
    return OnlineRetail(path)


def test_a_talk_is_an_item_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    """Every field of a talk lands where filters, search and the playground look for it."""
    items = list(talks(tmp_path, {}).items())
    check_each(items, check_item, "/items")
    assert items == [
        Item(
            "pycon-2014/monads",
            title="Monads",
            description="Boxes.",
            tags=("fp", "types"),
            categories=("PyCon 2014", "eng"),
            attributes={
                "event": "pycon-2014",
                "speakers": ["Ada"],
                "language": "eng",
                "url": "https://www.youtube.com/watch?v=abc",
                "youtube_id": "abc",
                "duration": 1322,
            },
            published_at=1_397_001_600_000_000,
        )
    ]


def test_summaries_join_descriptions_once(tmp_path: Path) -> None:
    """A summary leads, unless one of the two texts already holds the other."""
    dataset = talks(
        tmp_path,
        {"summary": "In short.\n", "description": "At length."},
        {"summary": "Boxes", "description": "Boxes of boxes."},
        {"summary": "Only this.", "description": ""},
        {"summary": "It says: here.", "description": "here."},
    )
    assert [item.description for item in dataset.items()] == [
        "In short.\n\nAt length.",
        "Boxes of boxes.",
        "Only this.",
        "It says: here.",
    ]


def test_recording_times_are_read_in_all_their_forms(tmp_path: Path) -> None:
    """A date, a time without zone and one with zone give the moment; nothing known gives none."""
    forms = ["2014-04-09", "2014-04-09T10:00:00", "2014-04-09T10:00:00+10:00", None, ""]
    dataset = talks(tmp_path, *({"recorded": form} for form in forms))
    midnight = 1_397_001_600_000_000
    assert [item.published_at for item in dataset.items()] == [
        midnight,
        midnight + 36_000_000_000,
        midnight,
        None,
        None,
    ]


@pytest.mark.parametrize("change", [{"title": None}, {"recorded": "soon"}, {"tags": 7}])
def test_a_line_that_is_no_talk_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(Invalid, match=r"videos\.jsonl\.gz, line 2: is not a talk"):
        list(talks(tmp_path, {}, change).items())


def test_each_line_of_a_sale_is_one_purchase(tmp_path: Path) -> None:
    """Purchases keep order and repeats, weigh 1 whatever the quantity, and have lasting ids."""
    dataset = sales(tmp_path)
    events = list(dataset.events())
    check_each(events, check_event, "/events")
    first, second = 1_291_191_960_000_000, 1_291_280_400_000_000
    assert events == [
        Event("17850", "85123A", "online-retail:0", "purchase", 1.0, first),
        Event("17850", "71053", "online-retail:1", "purchase", 1.0, first),
        Event("17850", "71053", "online-retail:2", "purchase", 1.0, first),
        Event("12583", "POST", "online-retail:3", "purchase", 1.0, second),
        Event("12583", "85123A", "online-retail:4", "purchase", 1.0, second),
    ]
    size = (tmp_path / "purchases.csv.xz").stat().st_size
    assert (dataset.progress.done, dataset.progress.total) == (size, size)


def test_stock_has_its_usual_title_and_charges_are_hidden(tmp_path: Path) -> None:
    """The most used title wins, the latest among equals; postage is not offered."""
    items = list(sales(tmp_path).items())
    check_each(items, check_item, "/items")
    assert items == [
        Item("85123A", title="CREAM LANTERN"),
        Item("71053", title="CLOCK, RED"),
        Item("POST", title="POSTAGE", hidden=True),
    ]
    again = SALES + "3,85123A,WHITE LANTERN,1,2010-12-03 09:00:00,2.55,1,France\n"
    again += "3,85123A,IVORY LANTERN,1,2010-12-03 09:00:00,2.55,1,France\n"
    assert next(sales(tmp_path, again).items()).title == "WHITE LANTERN"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("invoice,", "", "line 1: the columns must be invoice,item_id"),
        (",18.0,", ",", "line 5: has 7 cells, must have 8"),
        ("2010-12-02 09:00:00", "yesterday", r"line 5: timestamp: .* \(got 'yesterday'\)"),
    ],
)
def test_a_line_that_is_no_sale_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(Invalid, match=rf"purchases\.csv\.xz, {problem}"):
        list(sales(tmp_path, SALES.replace(old, new, 1)).events())


def test_a_folder_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"purchases\.csv\.xz cannot be read: No such file"):
        list(OnlineRetail(tmp_path).events())


def sequences(path: Path, text: str) -> ItemSequences:
    (path / "small.txt.xz").write_bytes(lzma.compress(text.encode()))
    return ItemSequences("small", path, "small.txt.xz")


def test_each_item_of_a_sequence_is_one_event(tmp_path: Path) -> None:
    """Events keep the order of the line, without times; items are those that occur."""
    dataset = sequences(tmp_path, "7 30 10 30\n9 20\n")
    events, items = list(dataset.events()), list(dataset.items())
    check_each(events, check_event, "/events")
    check_each(items, check_item, "/items")
    assert [(e.user_id, e.item_id, e.event_id, e.timestamp) for e in events] == [
        ("7", "30", "small:7:0", None),
        ("7", "10", "small:7:1", None),
        ("7", "30", "small:7:2", None),
        ("9", "20", "small:9:0", None),
    ]
    assert items == [Item("30"), Item("10"), Item("20")]
    assert list(ItemSequences("small", tmp_path / "small.txt.xz", "").items()) == items


@pytest.mark.parametrize("line", ["", "7"])
def test_a_line_without_an_item_is_named(tmp_path: Path, line: str) -> None:
    wanted = r"small\.txt\.xz, line 2: must be a user id and at least one item id"
    with pytest.raises(Invalid, match=wanted):
        list(sequences(tmp_path, f"7 30 10\n{line}\n").events())
