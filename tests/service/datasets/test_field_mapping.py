"""Mappings of columns to fields, by the records that they give."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.datasets.field_mapping import FieldMapping
from service.datasets.record_files import EventsFile, ItemsFile, ReadOptions
from service.domain.errors import Invalid
from service.domain.records import Event, Item

ORDERS = """\
Customer No;SKU;Qty;Invoice
17850;85123A; 6 ;A
17850;0007;-2;A
13047;85123A;1000;B
"""


def mapped(columns: dict[str, Any], constants: dict[str, str] | None = None, **rest: Any) -> Any:
    return ReadOptions(FieldMapping.parse(columns, constants or {}, **rest))


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "orders.csv"
    path.write_text(ORDERS)
    return path


IDS = {"user_id": "customer-no", "item_id": "SKU"}


def test_columns_and_constants_become_fields(orders: Path) -> None:
    """Names of columns differ in case and hyphens; a negative quantity is a return."""
    options = mapped(IDS, {"type": "purchase"}, weight="Qty", negative="return")
    file = EventsFile(orders, options)
    assert list(file.records()) == [
        Event("17850", "85123A", type="purchase", weight=6.0),
        Event("17850", "0007", type="return", weight=2.0),
        Event("13047", "85123A", type="purchase", weight=1000.0),
    ]
    assert file.survey.mapping.unread == ["Invoice"]


def test_a_mapped_column_is_no_other_field(tmp_path: Path) -> None:
    path = tmp_path / "products.csv"
    path.write_text("item_id,Description\n85123A,T-LIGHT HOLDER\n")
    file = ItemsFile(path, mapped({"title": "Description"}))
    assert list(file.records()) == [Item("85123A", title="T-LIGHT HOLDER")]
    both = ItemsFile(path, mapped({"title": "Description", "description": "Description"}))
    assert list(both.records()) == [
        Item("85123A", title="T-LIGHT HOLDER", description="T-LIGHT HOLDER")
    ]


def test_weights_are_logarithms_and_negative_rows_may_be_skipped(orders: Path) -> None:
    """A quantity of n weighs 1 + ln n; what is skipped is counted and no bad row."""
    file = EventsFile(orders, mapped(IDS, weight="Qty:log", negative="skip"))
    found = [event.weight for event in file.records()]
    assert found == pytest.approx([1 + math.log(6), 1 + math.log(1000)])
    assert (file.left_out, file.skipped.count) == (1, 0)


def test_negative_weights_need_a_decision(orders: Path) -> None:
    with pytest.raises(Invalid, match=r"Qty \(weight\): is negative; --negative skip or re"):
        list(EventsFile(orders, mapped(IDS, weight="Qty")).records())


@pytest.mark.parametrize("column", ["weight", "Weight"])
def test_a_quantity_may_be_called_weight(tmp_path: Path, column: str) -> None:
    """A rule reads the column named like the field that it sets, with returns and logarithms."""
    path = tmp_path / "orders.csv"
    path.write_text(f"user_id,item_id,{column}\nu,a,6\nu,b,-2\n")
    plain = EventsFile(path, mapped({}, weight="weight", negative="return"))
    assert list(plain.records()) == [
        Event("u", "a", weight=6.0),
        Event("u", "b", type="return", weight=2.0),
    ]
    logs = EventsFile(path, mapped({}, weight="weight:log", negative="return"))
    found = [event.weight for event in logs.records()]
    assert found == pytest.approx([1 + math.log(6), 1 + math.log(2)])
    path.write_text(f"user_id,item_id,{column}\nu,a,0\n")
    said = r"at least 1 for its logarithm \(got 0\); --skip-bad leaves such rows out, and --weight"
    with pytest.raises(Invalid, match=said):
        list(EventsFile(path, mapped({}, weight="weight:log")).records())


@pytest.mark.parametrize("column", ["weight", "Qty"])
def test_members_of_json_weigh_events(tmp_path: Path, column: str) -> None:
    """In JSON lines, whose rows may lack any member, a rule reads its column as in CSV."""
    path = tmp_path / "orders.jsonl"
    rows = [{"user_id": "u", "item_id": "a", column: 6}, {"user_id": "u", "item_id": "b"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    file = EventsFile(path, mapped({}, weight=f"{column}:log", negative="skip"))
    assert [event.weight for event in file.records()] == pytest.approx([1 + math.log(6), 1])


def test_attributes_have_types(tmp_path: Path) -> None:
    """Numbers are found out; codes with zeros in front stay text; a type may be said."""
    path = tmp_path / "items.csv"
    path.write_text(
        "id,name,price,code,sizes,sale,extra,dept,sub\n"
        'a,Cup,"£1,234.50",007,S|M,yes,"{""x"":1}",HOME,MUGS\n'
        "b,Pot,,012,,no,,HOME,\n"
    )
    columns = {
        "item_id": "id", "title": "name", "attributes.price": "price", "attributes.code": "code",
        "attributes.sizes:list": "sizes", "attributes.sale:flag": "sale",
        "attributes.extra:json": "extra", "categories": ["dept", "sub"],
    }  # fmt: skip
    file = ItemsFile(path, mapped(columns, {"attributes.shop": "main"}))
    attributes = {"price": 1234.5, "code": "007", "sizes": ["S", "M"], "sale": True}
    assert list(file.items()) == [
        Item("a", "Cup", categories=("HOME", "MUGS"),
             attributes={**attributes, "extra": {"x": 1}, "shop": "main"}),
        Item("b", "Pot", categories=("HOME",),
             attributes={"code": "012", "sale": False, "shop": "main"}),
    ]  # fmt: skip
    assert file.survey.mapping.types["attributes.price"] == "number"


@pytest.mark.parametrize(
    ("cell", "number"),
    [("-£3.50", -3.5), ("£-3.50", -3.5), ("+$ 1,200", 1200), ("3 €", 3), ("- 3", None)],
)
def test_numbers_have_signs_and_currencies(tmp_path: Path, cell: str, number: Any) -> None:
    """A sign stands before or behind the currency; a sign alone before a space is no number."""
    path = tmp_path / "products.csv"
    path.write_text(f'item_id,Price\na,"{cell}"\n')
    file = ItemsFile(path, replace(mapped({"attributes.price:number": "Price"}), decimal="."))
    if number is None:
        with pytest.raises(Invalid, match="must be a number"):
            list(file.records())
    else:
        (item,) = file.records()
        assert item.attributes == {"price": number}


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["true", "False", "TRUE", ""], [True, False, True, None]),
        (["false", "n/a"], [False, None]),
        (["yes", "no"], ["yes", "no"]),
        (["true", "1", "false"], ["true", "1", "false"]),
    ],
)
def test_a_column_of_true_and_false_is_a_flag(
    tmp_path: Path, cells: list[str], values: list[Any]
) -> None:
    path = tmp_path / "items.csv"
    path.write_text("item_id,Sold\n" + "".join(f"i{n},{c}\n" for n, c in enumerate(cells)))
    file = ItemsFile(path, mapped({"attributes.sold": "Sold"}))
    assert [item.attributes.get("sold") for item in file.items()] == values


def test_other_values_among_flags_are_named(tmp_path: Path) -> None:
    """A mixed column is text and a sentence says so; a late value is a bad row that says how."""
    path = tmp_path / "items.csv"
    path.write_text("item_id,Sold\na,true\nb,false\nc,perhaps\nd,N/A\n")
    file = ItemsFile(path, mapped({"attributes.sold": "Sold"}))
    assert [item.attributes.get("sold") for item in file.items()][:2] == ["true", "false"]
    assert str(file.survey.warning()).startswith(
        "Sold is kept as text: 2 values are true or false, and others not: 1, as 'perhaps'; "
        "--map attributes.sold:flag=Sold refuses"
    )
    path.write_text("item_id,Sold\n" + "a,true\n" * 10_001 + "b,maybe\n")
    late = ItemsFile(path, mapped({"attributes.sold": "Sold"}))
    assert late.survey.warning() is None
    with pytest.raises(Invalid, match=r"no, n, f, 0 .got 'maybe'.; --map attributes.sold:text=S"):
        list(late.items())


def test_a_text_among_numbers_is_a_bad_row(tmp_path: Path) -> None:
    """A value that was taken for a number must be one; absent ones may be written out."""
    path = tmp_path / "items.csv"
    path.write_text("item_id,price\n" + "".join(f"i{n},{n}.5\n" for n in range(20)) + "j,dear\n")
    columns = {"attributes.price": "price"}
    problem = r"price \(attributes.price\): must be a number \(got 'dear'\); --map .*:text=price"
    with pytest.raises(Invalid, match=rf"line 22, {problem}"):
        list(ItemsFile(path, mapped(columns)).items())
    path.write_text("item_id,price\ni,1\nj,N/A\nk,-\n")
    found = [item.attributes for item in ItemsFile(path, mapped(columns)).items()]
    assert found == [{"price": 1}, {}, {}]


def test_members_of_json_are_columns(tmp_path: Path) -> None:
    """A dotted column is a member; text of a mapped number is parsed, other text stays."""
    path = tmp_path / "items.jsonl"
    rows = [
        {"sku": "a", "price": {"net": "3.50"}, "title": " as it is "},
        {"sku": "b", "price": {"net": 4}, "attributes": {"own": 1}},
        {"sku": "c"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = ItemsFile(path, mapped({"item_id": "sku", "attributes.net": "price.net"}))
    assert list(found.items()) == [
        Item("a", " as it is ", attributes={"net": 3.5}),
        Item("b", attributes={"own": 1, "net": 4}),
        Item("c"),
    ]


@pytest.mark.parametrize(
    ("columns", "constants", "rest", "problem"),
    [
        ({"user_id": "Custmer No"}, {}, {}, r"no column 'Custmer No'.*Did you mean Customer No\?"),
        ({"buyer": "SKU"}, {}, {}, "csv: field buyer is unknown; allowed are user_id, item_id"),
        ({"rating": "SKU"}, {}, {}, "field rating is unknown; .*; --dislikes-below N reads"),
        ({**IDS, "attributes.x": "SKU"}, {}, {}, "field attributes.x is unknown"),
        (IDS, {"weight": "x"}, {}, "--constant weight=x: must be a number"),
        (IDS, {"user_id": "x"}, {}, "user_id has both a column and a constant"),
        ({**IDS, "weight": "Qty"}, {}, {"weight": "Qty"}, "weight has both a column and"),
        ({**IDS, "weight": "Qty"}, {}, {"weight": "Invoice"}, "weight has both a column and"),
        (IDS, {"weight": "2"}, {"weight": "Qty"}, "weight has both a column and"),
        (IDS, {}, {"weight": "Quantity"}, "--weight-from: there is no column 'Quantity'"),
        ({"item_id": "SKU"}, {}, {}, "column user_id: is required; there are Customer No, SKU"),
    ],
)  # fmt: skip
def test_wrong_mappings_name_the_columns(
    orders: Path, columns: Any, constants: Any, rest: Any, problem: str
) -> None:
    with pytest.raises(Invalid, match=problem):
        list(EventsFile(orders, mapped(columns, constants, **rest)).records())


def test_only_attributes_have_types() -> None:
    for target in ("title:text", "attributes.x:date"):
        with pytest.raises(Invalid, match=f"--map {target}: only attributes have a type, one of"):
            FieldMapping.parse({target: "a"}, {})


def attributes(path: Path, columns: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    read = ReadOptions(FieldMapping.parse(columns, {}), **options)
    return [dict(item.attributes) for item in ItemsFile(path, read).items()]


def test_members_of_an_object_come_from_columns(tmp_path: Path) -> None:
    """Latitude and longitude make a place; an update removes the one that is blank."""
    path = tmp_path / "places.csv"
    path.write_text("item_id,latitude,longitude\n1,43.66,-70.25\n2,44.9,\n")
    columns = {"attributes.place.lat": "latitude", "attributes.place.lon": "longitude"}
    expected = [{"place": {"lat": 43.66, "lon": -70.25}}, {"place": {"lat": 44.9}}]
    assert attributes(path, columns) == expected
    (_, second) = ItemsFile(path, mapped(columns)).patches()
    old = Item("2", attributes={"place": {"lat": 1, "lon": 2, "city": "x"}})
    assert second.apply(old).attributes == {"place": {"lat": 44.9, "city": "x"}}
    rows = [{"item_id": "3", "lat": 1.5, "attributes": {"place": {"city": "x"}}}]
    (tmp_path / "places.jsonl").write_text(json.dumps(rows[0]))
    found = attributes(tmp_path / "places.jsonl", {"attributes.place.lat": "lat"})
    assert found == [{"place": {"city": "x", "lat": 1.5}}]
    with pytest.raises(Invalid, match=r"attributes.place is mapped, and so is its member"):
        attributes(path, {**columns, "attributes.place": "latitude"})
    with pytest.raises(Invalid, match=r"attributes.a..b is unknown"):
        attributes(path, {"attributes.a..b": "latitude"})


@pytest.mark.parametrize("name", ["sku", "Variant SKU", "ISBN-13", "gtin14", "productMpn", "code"])
def test_identifiers_stay_as_they_are_written(tmp_path: Path, name: str) -> None:
    """A column that is named or set as an identifier is text, in CSV and in JSON."""
    cells = ["1000", "1,234", "12E4", "007"]
    path = tmp_path / "a.csv"
    path.write_text(f"item_id,{name}\n" + "".join(f'"{cell}","{cell}"\n' for cell in cells))
    columns = {"attributes.code": name}
    known: dict[str, Any] = {"identifiers": ("sku", "isbn", "gtin", "mpn")}
    if name == "code":
        path.write_text(path.read_text().replace("12E4", "1204").replace("007", "7"))
        assert attributes(path, columns, decimal=".")[1] == {"code": 1234}
        known["identifiers"], cells[2:] = ("Code",), ["1204", "7"]
    assert [found["code"] for found in attributes(path, columns, **known)] == cells
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"item_id": str(v), name: v}) for v in (1000, 7.0, "AB")))
    assert [found["code"] for found in attributes(path, columns, **known)] == ["1000", "7", "AB"]
    assert attributes(path, {"attributes.n:number": name}, skip_bad=True) == [{"n": 1000}, {"n": 7}]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["12.5", "3", "from 14.99"], "number"),
        (["12.5", "free", "1", "sold out", "2"], "number"),
        (["38", "M"], "text"),
        (["1", "2", "12E4"], "text"),
        (["1", "2", '="3"'], "text"),
        (["1", '=""', r"\N", "none"], "number"),
        ([6.99, "None", "from 14.99"], "number"),
        ([6.99, "a", "b"], "text"),
        ([6.99, None], None),
        (["1", "2", "x"], "number"),
    ],
)
def test_a_few_bad_cells_do_not_make_numbers_texts(
    tmp_path: Path, cells: list[Any], kind: str | None
) -> None:
    """Most cells decide, and the others are bad rows; a code among them makes all of them texts."""
    if all(isinstance(cell, str) for cell in cells):
        path = tmp_path / "a.csv"
        lines = [f"i,{cell}\n" for cell in cells]
        path.write_text("item_id,price\n" + "".join(lines))
    else:
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(json.dumps({"item_id": "i", "price": cell}) for cell in cells))
    file = ItemsFile(path, ReadOptions(FieldMapping.parse({"attributes.p": "price"}, {})))
    assert file.survey.mapping.types.get("attributes.p") == kind


def test_marks_of_absence_are_absence_in_every_field(tmp_path: Path) -> None:
    r"""`\N` of databases, a guard around nothing, and what the caller names; never in JSON."""
    path = tmp_path / "a.tsv"
    head = "item_id\ttitle\ttags\tpublished_at\thidden\tx\n"
    path.write_text(head + "a\t\\N\tDrama|\\N\t\\N\t\\N\t\\N\n" + "\\N\tb\t\t\t\t\n")
    columns = FieldMapping.parse({"attributes.x:text": "x"}, {})
    file = ItemsFile(path, ReadOptions(columns, skip_bad=True))
    assert list(file.items()) == [Item("a", tags=("Drama",))]
    assert file.skipped.messages[0].endswith(r"line 3, item_id: is required (got '\\N')")
    path.write_text(head + 'a\tNULL\tNULL\tNULL\tNULL\tNULL\nb\t="NULL"\t\t\t\t="007"\n')
    found = list(ItemsFile(path, ReadOptions(columns, absent=["NULL"])).items())
    assert found == [Item("a"), Item("b", attributes={"x": "007"})]
    lines = tmp_path / "a.jsonl"
    lines.write_text(r'{"item_id":"a","title":"\\N","description":"NULL"}')
    assert list(ItemsFile(lines).items()) == [Item("a", r"\N", "NULL")]
    assert list(ItemsFile(lines, ReadOptions(absent=["NULL"])).items()) == [Item("a", r"\N")]


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (
            "movie.id.trakt",
            r"no row has 'movie.id.trakt'; movie has title, ids. Did you mean movie.ids",
        ),
        ("film.ids", "no column 'film.ids'; there are user_id, movie, items"),
        ("items.id", "items is a list in the rows, so that 'items.id' cannot be read"),
        (None, "column item_id: is required; there are user_id, movie, items. Name it with --map"),
    ],
)
def test_a_path_that_is_not_there_is_named(
    tmp_path: Path, column: str | None, problem: str
) -> None:
    """Only names that the file has are listed."""
    path = tmp_path / "a.jsonl"
    row = {"user_id": 7, "movie": {"title": "T", "ids": {"trakt": 1}}, "items": [{"id": "a"}]}
    path.write_text(json.dumps(row))
    with pytest.raises(Invalid, match=problem):
        list(EventsFile(path, mapped({"item_id": column} if column else {})).records())
    file = EventsFile(path, mapped({"item_id": "movie.ids.trakt"}))
    assert list(file.records()) == [Event("7", "1")]
    assert file.survey.mapping.unread == ["items"]
    assert file.survey.describe() == ""
