"""Reading and writing records in every file format, and the errors of bad files."""

import errno
import gzip
import json
import lzma
import re
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.datasets.field_mapping import FieldMapping
from service.datasets.record_files import (
    MAX_MESSAGES,
    EventsFile,
    ItemsFile,
    ReadOptions,
    UsersFile,
    export_records,
)
from service.datasets.rows import ITEM, to_json_lines
from service.datasets.time_formats import TimeFormat
from service.domain.errors import Invalid, StoreFull, Unavailable
from service.domain.records import Event, Item, User

MOMENT = 978_300_760_500_000  # 2000-12-31T22:12:40.5Z

EVENTS = [
    Event("ann", "i1", "e1", "view", 0.5, MOMENT),
    Event("bob", "naïve, item", "e2", "like", 1.0, MOMENT + 1_000_000),
    Event(
        "ann",
        "i2",
        "e3",
        key=np.array([0.1, -2.0], np.float32),
        value=np.array([1.0], np.float32),
    ),
]
ITEMS = [
    Item(
        "i1",
        title='Say "hi"\nthere',
        description="a, b",
        tags=("x", "y z"),
        categories=("c",),
        attributes={"year": 1995, "deep": {"list": [1.5, True, "é"]}},
        embedding=np.array([0.1, 1e-30, 3e38], np.float32),
        hidden=True,
        published_at=MOMENT,
    ),
    Item("i2"),
]

EVENTS_JSON = """\
{"user_id":"ann","item_id":"i1","event_id":"e1","weight":0.5,"timestamp":"2000-12-31T22:12:40.5Z"}

{"user_id":"bob","item_id":"naïve, item","event_id":"e2","type":"like","weight":1,\
"timestamp":"2000-12-31T23:12:41.5+01:00"}
{"user_id":"ann","item_id":"i2","event_id":"e3","timestamp":null,"key":[0.1,-2],"value":[1]}"""

EVENTS_CSV = """\
event_id,user_id,item_id,type,weight,timestamp,key,value\r
e1,ann,i1,,0.5,2000-12-31T22:12:40.5Z,,\r
e2,bob,"naïve, item",like,1,2000-12-31T23:12:41.5+01:00,,\r
e3,ann,i2,,,,"[0.1,-2]",[1]\r
"""

ITEMS_CSV = """\
item_id,title,description,tags,categories,attributes,embedding,hidden,published_at
i1,"Say ""hi""
there","a, b",x| y z |,c,"{""year"":1995,""deep"":{""list"":[1.5,true,""é""]}}",\
"[0.1,1e-30,3e38]",true,2000-12-31T22:12:40.5Z
i2,,,,,,,false,
"""

EVENTS_TABLE = {
    "event_id": ["e1", "e2", "e3"],
    "user_id": ["ann", "bob", "ann"],
    "item_id": ["i1", "naïve, item", "i2"],
    "type": [None, "like", None],
    "weight": [0.5, 1.0, None],
    "key": [None, None, [0.1, -2.0]],
    "value": [None, None, [1.0]],
}
ITEMS_TABLE = {
    "item_id": ["i1", "i2"],
    "title": ['Say "hi"\nthere', ""],
    "description": ["a, b", None],
    "tags": [["x", "y z"], []],
    "categories": ["c", None],
    "attributes": ['{"year":1995,"deep":{"list":[1.5,true,"é"]}}', ""],
    "embedding": pa.array([[0.1, 1e-30, 3e38], None], pa.list_(pa.float32())),
    "hidden": [True, None],
    "published_at": pa.array([MOMENT * 1000, None], pa.timestamp("ns", "Europe/Berlin")),
}

Put = Callable[..., Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Write text, bytes or a table under a name; returns the path."""

    def put(name: str, content: str | bytes | dict[str, Any]) -> Path:
        path = tmp_path / name
        if isinstance(content, dict):
            pq.write_table(pa.table(content), path)
        else:
            data = content.encode() if isinstance(content, str) else content
            packs: dict[str, Callable[[bytes], bytes]]
            packs = {".gz": gzip.compress, ".xz": lzma.compress}
            pack = packs.get(path.suffix)
            path.write_bytes(pack(data) if pack else data)
        return path

    return put


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", EVENTS_JSON),
        ("a.NDJSON", EVENTS_JSON + "\n"),
        ("a.jsonl", "\ufeff" + EVENTS_JSON.replace("\n", "\r\n")),
        ("a.jsonl.gz", EVENTS_JSON),
        ("a.jsonl.xz", EVENTS_JSON),
        ("a.csv", EVENTS_CSV),
        ("a.csv", "\ufeff" + EVENTS_CSV.replace("\r", "")),
        ("a.csv.gz", EVENTS_CSV),
        ("a.csv.xz", EVENTS_CSV),
        ("a.tsv", EVENTS_CSV.replace(",", "\t").replace("naïve\t", "naïve,").replace(
            '"[0.1\t-2]"', "[0.1,-2]").replace('"', "")),
    ],
)  # fmt: skip
def test_events_read_alike_from_every_text_format(put: Put, name: str, text: str) -> None:
    """The same events come from JSON lines, CSV and TSV, packed or not, with any line ends."""
    file = EventsFile(put(name, text))
    assert list(file.events()) == EVENTS
    assert list(file.items()) == []
    size = (file.progress.done, file.progress.total)
    assert size == ((file._path.stat().st_size,) * 2)


RATED = """user_id,item_id,type,rating,event_id
u,a,watch,2,1
u,b,watch,3,2
u,c,,2.5,3
u,d,watch,,4
u,e,,,5
u,f,,-1e3,6
"""


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_ratings_below_a_number_are_dislikes(put: Put, form: str) -> None:
    """Whatever type a row names; what is rated higher, or not at all, keeps its own."""
    head, *cells = [line.split(",") for line in RATED.splitlines()]
    rows = [{k: v for k, v in zip(head, row, strict=True) if v} for row in cells]
    numbers = [row | ({"rating": float(row["rating"])} if "rating" in row else {}) for row in rows]
    if form == "csv":
        path = put("r.csv", RATED)
    elif form == "jsonl":
        path = put("r.jsonl", "\n".join(json.dumps(row) for row in numbers))
    else:
        path = put("r.parquet", {name: [row.get(name) for row in numbers] for name in head})
    found = list(EventsFile(path, dislikes_below=3).events())
    kinds = ["dislike", "watch", "dislike", "watch", "view", "dislike"]
    assert [event.type for event in found] == kinds
    assert [event.item_id for event in found] == list("abcdef")
    assert found[1] == Event("u", "b", "2", "watch")
    assert EventsFile(path).survey.mapping.unread == ["rating"]


@pytest.mark.parametrize("rating", ['"3"', "true", "[3]"])
def test_a_rating_is_a_number(put: Put, rating: str) -> None:
    path = put("r.jsonl", f'{{"user_id":"u","item_id":"i","rating":{rating}}}')
    with pytest.raises(Invalid, match=r"line 1, rating: must be a finite number"):
        list(EventsFile(path, dislikes_below=3).events())


def test_items_read_alike_from_csv_and_json(put: Put) -> None:
    """Lists split on "|", JSON cells, quoted line ends and booleans give the items of the JSON."""
    assert list(ItemsFile(put("a.csv", ITEMS_CSV)).items()) == ITEMS
    text = b"".join(to_json_lines(ITEMS))
    assert list(ItemsFile(put("a.jsonl", text)).items()) == ITEMS
    assert list(ItemsFile(put("a.jsonl", text)).events()) == []


def test_events_and_items_read_alike_from_parquet(put: Put) -> None:
    """Parquet gives the same records, and keeps instants whatever the zone."""
    times = pa.array([MOMENT, MOMENT + 1_000_000, None], pa.timestamp("us", "UTC"))
    events = EventsFile(put("e.parquet", {**EVENTS_TABLE, "timestamp": times}))
    assert list(events.events()) == EVENTS
    assert events.progress.done == events.progress.total > 0
    items = ItemsFile(put("i.parquet", ITEMS_TABLE))
    assert list(items.items()) == ITEMS


def test_structs_and_maps_of_parquet_are_attributes(put: Put) -> None:
    """A struct's nulls are members that a row does not have; maps are objects too."""
    table: dict[str, Any] = {
        "item_id": ["a", "b"],
        "attributes": [{"year": 1995, "by": None}, {"year": None, "by": "Ann"}],
    }
    found = [item.attributes for item in ItemsFile(put("s.parquet", table)).items()]
    assert found == [{"year": 1995}, {"by": "Ann"}]
    table["attributes"] = pa.array(
        [[("year", 1)], [("month", 2)]], pa.map_(pa.string(), pa.int64())
    )
    found = [item.attributes for item in ItemsFile(put("m.parquet", table)).items()]
    assert found == [{"year": 1}, {"month": 2}]


@pytest.mark.parametrize(
    ("values", "zone", "expected"),
    [
        ([978_300_760, None], None, [978_300_760_000_000, None]),
        ([978_300_760_500], None, [MOMENT]),
        ([MOMENT], None, [MOMENT]),
        (["2000-12-31 22:12:40.5", "1970-01-02"], "UTC", [MOMENT, 86_400_000_000]),
        (["2000-12-31T23:12:40.5+01:00"], "UTC", [MOMENT]),
        (["2000-12-31T23:12:40.5+01:00"], None, [MOMENT]),
        (["31/12/2000 22:12", "1/1/2001 10:12:40 pm"], "UTC", [978300720000000, 978387160000000]),
    ],
)
def test_formats_of_times_are_found_out(
    put: Put, values: list[Any], zone: str | None, expected: list[int | None]
) -> None:
    """Units, order of day and month, and missing seconds are seen in JSON lines and CSV alike."""
    rows = [{"user_id": "u", "item_id": "i", "timestamp": value} for value in values]
    json_path = put("t.jsonl", "\n".join(json.dumps(row) for row in rows))
    cells = "".join(f"u,i,{'' if value is None else value}\n" for value in values)
    csv_path = put("t.csv", "user_id,item_id,timestamp\n" + cells)
    options = ReadOptions(zone=None if zone is None else ZoneInfo(zone))
    for path in (json_path, csv_path):
        assert [event.timestamp for event in EventsFile(path, options).events()] == expected


def test_values_of_parquet_become_those_of_json(put: Put) -> None:
    """Decimals are numbers, dates are RFC 3339, NaN is absent, numeric ids are texts."""
    moment = datetime(2024, 3, 15, 10, 20, 33)  # noqa: DTZ001 (the point)
    table = {
        "item_id": [7, 8],
        "title": pa.array([b"A", None], pa.binary()),
        "price": pa.array([Decimal("12.50"), None], pa.decimal128(10, 2)),
        "stock": pa.array([3, None], pa.decimal128(10, 0)),
        "rating": [4.5, float("nan")],
        "day": [date(2024, 1, 1), None],
        "seen": pa.array([moment, None], pa.timestamp("ns")),
        "sold": pa.array([moment, None], pa.timestamp("us", "UTC")),
        "more": [{"day": date(2024, 1, 1), "x": float("nan")}, None],
    }
    columns = {f"attributes.{name}": name for name in list(table)[2:]}
    mapping = FieldMapping.parse(columns, {})
    file = ItemsFile(put("v.parquet", table), ReadOptions(mapping))
    assert list(file.items()) == [
        Item(
            "7",
            "A",
            attributes={
                "price": 12.5,
                "stock": 3,
                "rating": 4.5,
                "day": "2024-01-01",
                "seen": "2024-03-15T10:20:33Z",
                "sold": "2024-03-15T10:20:33Z",
                "more": {"day": "2024-01-01"},
            },
        ),
        Item("8"),
    ]
    assert file.times.warning().startswith("times without a zone: 1, taken as UTC; --timezone")
    assert file.survey.describe() == ""
    tokyo = ReadOptions(mapping, zone=ZoneInfo("Asia/Tokyo"))
    (first, _) = ItemsFile(put("v.parquet", table), tokyo).items()
    assert first.attributes["seen"] == "2024-03-15T01:20:33Z"
    table = {"item_id": [101.0, float("nan")], "user_id": [1, 2]}  # as pandas writes missing ids
    events = EventsFile(put("i.parquet", table), ReadOptions(skip_bad=True))
    assert [event.item_id for event in events.events()] == ["101"]


def test_a_json_array_is_read_as_lines_are(put: Put) -> None:
    """Written over lines or in one, packed, longer than what is read at once; numbers are ids."""
    rows = [{"item_id": n, "title": f'"{n}",]' + "é" * 1_000} for n in range(400)]
    expected = [Item(str(row["item_id"]), str(row["title"])) for row in rows]
    for name, indent in (("a.json", 2), ("a.json.gz", None), ("a.jsonl", None), ("a", 1)):
        path = put(name, json.dumps(rows, indent=indent, ensure_ascii=False))
        file = ItemsFile(path)
        assert list(file.items()) == expected
        assert file.progress.done == file.progress.total
    assert list(ItemsFile(put("b.json", '{"item_id":"a"}')).items()) == [Item("a")]
    assert list(ItemsFile(put("b.json", " [ ] ")).items()) == []
    text = '[{"item_id":"a"}, 7, {"item_id":NaN},\n {"title":"b"}]'
    lenient = ItemsFile(put("c.json", text), ReadOptions(skip_bad=True))
    assert list(lenient.items()) == [Item("a")]
    assert [message.split("c.json, ")[1] for message in lenient.skipped.messages] == [
        "row 2: must be a JSON object, not int",
        "row 3: must be JSON: unexpected character, expected a JSON value at character 12",
        "row 4, item_id: is required; the row has title",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"item_id":"a"}', "ends early: the JSON array is not closed"),
        ('[{"item_id":"a"', "row 1: must be JSON: the file ends within it"),
        ('[{"item_id":"a"} {"item_id":"b"}]', "behind row 1: must be a comma or ], not '{'"),
        ('[{"item_id" "a", "title": "long enough"}]', "row 1: must be JSON: Expecting ':' delim"),
        ('[{"item_id":"' + "x" * (5 << 20) + '"}]', "row 1: is longer than 4,194,304 characters"),
        ("[" + "[" * 100_000, "row 1: must be JSON: it is nested too deep"),
    ],
)
def test_a_damaged_array_stops_the_reading(put: Put, text: str, problem: str) -> None:
    """The next object cannot be found, so that bad rows cannot be skipped."""
    with pytest.raises(Invalid, match=re.escape(problem)):
        list(ItemsFile(put("d.json", text), ReadOptions(skip_bad=True)).items())


def test_a_list_of_texts_is_a_description(put: Put) -> None:
    """Its members are lines; numbers are written out."""
    rows = '{"item_id":"a","title":1984,"description":["A soap bar.","By hand."],"tags":[1,"x"]}'
    (item,) = ItemsFile(put("a.jsonl", rows + "\n")).items()
    assert item == Item("a", "1984", "A soap bar.\nBy hand.", tags=("1", "x"))
    (item,) = ItemsFile(put("b.jsonl", '{"item_id":"a","description":[]}')).items()
    assert item == Item("a")


@pytest.mark.parametrize("late", [0, 11_000])
def test_units_of_times_are_not_mixed(put: Put, late: int) -> None:
    """Both rows are named, however far apart they are; a chosen unit is of all rows."""
    rows = "u,i,1433221332\n" + "u,i,0\n" * late + "u,i,1433221332117\n"
    path = put("m.csv", "user_id,item_id,timestamp\n" + rows)
    problem = rf"line 2 \('1433221332'\) .*line {late + 3} \('1433221332117'\)"
    if late:
        problem = (
            rf"line {late + 3}, timestamp: is a time in ms .*line 2 \('1433221332'\) is one in s"
        )
    with pytest.raises(Invalid, match=problem):
        list(EventsFile(path).records())
    chosen = [
        event.timestamp for event in EventsFile(path, ReadOptions(time_format="ms")).records()
    ]
    assert chosen[-1] == 1_433_221_332_117_000


def test_naive_times_of_parquet_need_a_zone(put: Put) -> None:
    """Parquet times without a zone are read in the caller's, and refused without it."""
    for values in ([datetime(1970, 1, 2)], [date(1970, 1, 2)]):  # noqa: DTZ001 (the point)
        path = put("n.parquet", {"item_id": ["i"], "published_at": values})
        utc = ReadOptions(zone=ZoneInfo("UTC"))
        assert next(ItemsFile(path, utc).items()).published_at == 86_400_000_000
        with pytest.raises(Invalid, match=r"row 1, published_at: must have a zone.*--timezone"):
            list(ItemsFile(path).items())
    path = put("z.parquet", {"item_id": ["i"], "published_at": [datetime(1970, 1, 2, tzinfo=UTC)]})
    assert next(ItemsFile(path).items()).published_at == 86_400_000_000


BAD_EVENTS = [
    ("{", "must be JSON"),
    ("[1]", "must be a JSON object, not list"),
    ('{"item_id":"i"}', "user_id: is required"),
    ('{"user_id":null,"item_id":"i"}', "user_id: is required"),
    ('{"user_id":"","item_id":"i"}', "user_id: must be 1 to 256 bytes"),
    ('{"user_id":true,"item_id":"i"}', r"user_id: must be a string, not bool \(got True\)"),
    ('{"user_id":1.5e300,"item_id":"i"}', "user_id: must be a string, not float"),
    ('{"user_id":"u","item_id":["i","j"]}', "item_id: must be one value, not a list of 2; a row"),
    ('{"user_id":"u\\u0000","item_id":"i"}', "user_id: must not contain NUL"),
    ('{"user_id":"\\ud800","item_id":"i"}', "must be JSON"),
    ('{"user_id":"u","item_id":"i","weight":"1"}', r"weight: must be a number.*\(got '1'\)"),
    ('{"user_id":"u","item_id":"i","weight":true}', "weight: must be a number, not bool"),
    ('{"user_id":"u","item_id":"i","weight":1e300}', "weight: must be finite"),
    ('{"user_id":"u","item_id":"i","weight":NaN}', "must be JSON"),
    ('{"user_id":"u","item_id":"i","timestamp":"soon"}', "timestamp: must be a date as %Y-%m-%d"),
    (
        '{"user_id":"u","item_id":"i","timestamp":"2000-12-31T22:12:40"}',
        "timestamp: must have a zone",
    ),
    (
        '{"user_id":"u","item_id":"i","timestamp":1.5}',
        "timestamp: must be a time as %Y-%m-%d; for numbers",
    ),
    ('{"user_id":"u","item_id":"i","key":[]}', "key: must be one row of at least one number"),
    ('{"user_id":"u","item_id":"i","key":[1,"2"]}', "key: must be a list of numbers"),
    ('{"user_id":"u","item_id":"i","key":[1e300]}', "key: must hold finite numbers only"),
]


@pytest.mark.parametrize(("bad", "problem"), BAD_EVENTS)
def test_a_bad_line_of_json_names_place_field_and_rule(put: Put, bad: str, problem: str) -> None:
    """Reading stops with file, line, field, the value and what is allowed."""
    good = '{"user_id":"u","item_id":"i","timestamp":"2024-01-01T00:00:00Z"}\n'
    path = put("b.jsonl", good + "\n" + bad + "\n" + good)
    with pytest.raises(Invalid, match=rf"b\.jsonl, line 3[,:] {problem}"):
        list(EventsFile(path).events())


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("i,t", "has 2 cells, must have 7"),
        (
            "i,,,,,maybe,",
            r"hidden: must be true, yes, y, t, 1 or false, no, n, f, 0 \(got 'maybe'\)",
        ),
        ("i,,,{,,,", r"attributes: must be JSON.*\(got '\{'\)"),
        ("i,,,[1],,,", r"attributes: must be an object, not list \(got '\[1\]'\)"),
        ("i,,,,0.5,,", r"embedding: must be a list of numbers \(got '0\.5'\)"),
        ("i,,,,,,2001-02-30T00:00:00Z", "published_at: must be a date as %Y-%m-%d"),
        (",T,,,,,", "item_id: is required"),
        ('"i"x,,,,,,', "must be CSV"),
        ('i,"never closed,,,,,', "must be CSV"),
        (b"i\xff,,,,,,", "item_id: has a lone surrogate"),
        ('i,,,"{""a"":{""b"":18446744073709551615}}",,,', "attributes/a/b: .* 64 bits"),
    ],
)
def test_a_bad_line_of_csv_names_place_field_and_rule(
    put: Put, bad: str | bytes, problem: str
) -> None:
    """Line numbers count the lines inside quoted cells."""
    head = b"item_id,title,tags,attributes,embedding,hidden,published_at\n"
    head += 'a,"ü\nü",,,,,2001-02-03T00:00:00Z\n'.encode()
    data = bad.encode() if isinstance(bad, str) else bad
    path = put("b.csv", head + data + b"\n" + "ü,,,,,,\n".encode() * 9)
    with pytest.raises(Invalid, match=rf"b\.csv, line 4[,:] {problem}"):
        list(ItemsFile(path).items())


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (
            "user_id,item",
            "column item_id: is required; there are user_id, item. Name",
        ),
        ("user_id", "column item_id: is required; there are user_id"),
        ("user_id,item_id,user_id", "column user_id: must not occur twice"),
        ("", "user_id: is required; .* none. Name it with --map user_id=COLUMN --map item_id=COL"),
    ],
)
def test_wrong_columns_stop_even_a_lenient_reading(put: Put, header: str, problem: str) -> None:
    """Wrong columns are refused even with `skip_bad`."""
    for path in (put("h.csv", header + "\n"), put("h.csv.gz", header + "\n")):
        with pytest.raises(Invalid, match=problem):
            list(EventsFile(path, ReadOptions(skip_bad=True)).events())
    with pytest.raises(Invalid, match="column user_id: is required; there are item"):
        list(EventsFile(put("h.parquet", {"item": ["i"]})).events())


def test_bad_lines_are_skipped_and_reported(put: Put) -> None:
    """All good lines come; all bad ones are counted and the first ones described, each reading."""
    bad = [line for line, _ in BAD_EVENTS]
    good = '{"user_id":"u","item_id":"i"}'
    file = EventsFile(
        put("b.jsonl", "\n".join([good, *bad * 10, good])), ReadOptions(skip_bad=True)
    )
    for _ in range(2):
        assert len(list(file.events())) == 2
        assert file.skipped.count == len(bad) * 10 > MAX_MESSAGES
        assert len(file.skipped.messages) == MAX_MESSAGES
        assert "b.jsonl, line 2: must be JSON" in file.skipped.messages[0]
    bad_csv = 'user_id,item_id,weight\nu,i,1\n"u"x,i,1\nu,i,heavy\nu,i\nu,i,2\n'
    csv_file = EventsFile(put("b.csv", bad_csv), ReadOptions(skip_bad=True))
    assert [event.weight for event in csv_file.events()] == [1.0, 2.0]
    assert [told.split(":")[0].split(", ")[1:] for told in csv_file.skipped.messages] == [
        ["line 3"],
        ["line 4", "weight"],
        ["line 5"],
    ]
    table = {"user_id": ["u", None, "u"], "item_id": ["i", "i", "j"]}
    parquet = EventsFile(put("b.parquet", table), ReadOptions(skip_bad=True))
    assert [event.item_id for event in parquet.events()] == ["i", "j"]
    assert parquet.skipped.messages[0].endswith("b.parquet, row 2, user_id: is required")


def test_events_without_id_get_one_that_lasts(put: Put) -> None:
    """Generated event ids are stable for a file and differ between lines."""
    line = '{"user_id":"u","item_id":"i"}\n'
    first = [event.event_id for event in EventsFile(put("a.jsonl", line * 2)).events()]
    again = [event.event_id for event in EventsFile(put("a.jsonl", line * 3)).events()]
    assert again[:2] == first
    assert len(set(again)) == 3
    other = line.replace("}", ',"type":"like"}')
    changed = [event.event_id for event in EventsFile(put("a.jsonl", line + other)).events()]
    assert changed[0] == first[0]
    assert changed[1] != first[1]
    elsewhere = next(EventsFile(put("b.csv", "item_id,user_id\ni,u\n")).events())
    assert elsewhere.event_id == first[0]


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.jsonl.gz", "x.jsonl.xz"])
def test_what_is_written_reads_back_the_same(tmp_path: Path, name: str) -> None:
    """Events, items and users survive export and import, packed or not."""
    users = [User("ann", {"age": 24, "zip": "012"}, ("drama", "i1")), User("bob")]
    path = tmp_path / name
    assert export_records(path, EVENTS) == 3
    assert list(EventsFile(path).events()) == EVENTS
    assert export_records(path, ITEMS) == 2
    assert list(ItemsFile(path).items()) == ITEMS
    assert export_records(path, users) == 2
    assert list(UsersFile(path).records()) == users
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = TEXTS.filter(lambda text: text != "" and "\0" not in text)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
VECTORS = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=4
)


@given(
    st.builds(
        Item,
        item_id=IDS,
        title=TEXTS,
        description=TEXTS,
        tags=st.lists(IDS, max_size=3).map(tuple),
        attributes=st.dictionaries(TEXTS, JSON, max_size=3),
        embedding=st.none() | VECTORS.map(lambda v: np.array(v, np.float32)),
        hidden=st.booleans(),
        published_at=st.none() | st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999),
    )
)
def test_any_item_is_the_same_after_a_line_of_json(item: Item) -> None:
    """Whatever an item may hold is equal, bit for bit, after export and import."""
    (line,) = to_json_lines([item])
    assert line.count(b"\n") == 1
    assert ITEM.record(json.loads(line), TimeFormat()) == item


def test_packed_files_that_end_early_are_an_error(put: Put) -> None:
    """A cut gzip or xz stream is told of, never taken for a shorter file."""
    for name in ("c.jsonl.gz", "c.jsonl.xz", "c.csv.gz", "c.csv.xz"):
        head = "" if "jsonl" in name else "user_id,item_id\n"
        line = '{"user_id":"u%d","item_id":"i"}\n' if "jsonl" in name else "u%d,i\n"
        path = put(name, head + "".join(line % n for n in range(1000)))
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(Invalid, match=f"{name} is damaged or ends early"):
            list(EventsFile(path, ReadOptions(skip_bad=True)).events())
        path.write_bytes(b"this is not packed")
        with pytest.raises(Invalid, match=f"{name} is damaged or ends early"):
            list(EventsFile(path, ReadOptions(skip_bad=True)).events())


def test_full_disk_raises_store_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export for which there is no room is a `StoreFull`, and leaves nothing."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("service.runtime.durable_files.os.fsync", full)
    with pytest.raises(StoreFull, match=r"no room to write .*x\.jsonl"):
        export_records(tmp_path / "x.jsonl", ITEMS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.xlsx", "a.parquet.gz", "a.csv.zip"])
def test_unknown_endings_are_refused_with_the_known(put: Put, name: str) -> None:
    """The format is never guessed from the content."""
    with pytest.raises(Invalid, match=r"must end in one of \.jsonl \.ndjson \.csv"):
        EventsFile(put(name, b""))
    with pytest.raises(Invalid, match=r"must end in \.jsonl or \.ndjson"):
        export_records(put(name, b""), [])


def test_missing_and_non_parquet_files_are_refused(tmp_path: Path, put: Put) -> None:
    """The error names the path; a missing file is refused before anything is read."""
    with pytest.raises(Invalid, match=r"none\.csv is not a file$"):
        EventsFile(tmp_path / "none.csv")
    with pytest.raises(Invalid, match=r" is a folder: name the files in it$"):
        EventsFile(tmp_path)
    with pytest.raises(Invalid, match=r"none\.csv is not a file, since .*/dta does not exist$"):
        EventsFile(tmp_path / "dta" / "deep" / "none.csv")
    with pytest.raises(Invalid, match=r"p\.parquet cannot be read as Parquet"):
        next(EventsFile(put("p.parquet", b"PAR1 not really")).events())


def test_parquet_without_pyarrow_says_how_to_install_it(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put("e.parquet", EVENTS_TABLE)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(Unavailable, match=r"pip install 'heed\[parquet\]'"):
        next(EventsFile(path).events())
    assert len(list(EventsFile(put("e.jsonl", EVENTS_JSON)).events())) == 3
