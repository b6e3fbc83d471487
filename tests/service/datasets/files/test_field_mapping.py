"""Mappings of columns to fields, by the records that they give."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from service.datasets.files.field_mapping import FieldMapping
from service.datasets.files.file_survey import ReadOptions
from service.datasets.files.record_files import EventsFile, ItemsFile
from service.domain.errors import Invalid
from service.domain.records import Event, Item

ORDERS = """\
Customer No;SKU;Qty;Invoice
17850;85123A; 6 ;A
17850;0007;-2;A
13047;85123A;1000;B
"""


def mapped(columns: dict[str, Any], constants: dict[str, str] | None = None, **rest: Any) -> Any:
    """Options with this mapping."""
    return ReadOptions(FieldMapping.parse(columns, constants or {}, **rest))


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """A wholesaler's orders."""
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
    """A column that is named like a field, and mapped to another, is read once."""
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
    """Without --negative the row is bad, and the message says what would help."""
    with pytest.raises(Invalid, match=r"line 3, weight: is negative; --negative skip or return"):
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
    file = ItemsFile(path, mapped({"attributes.price:number": "Price"}))
    if number is None:
        with pytest.raises(Invalid, match="must be a number"):
            list(file.records())
    else:
        (item,) = file.records()
        assert item.attributes == {"price": number}


def test_a_text_among_numbers_is_a_bad_row(tmp_path: Path) -> None:
    """What was taken for a number must be one; absent ones may be written out."""
    path = tmp_path / "items.csv"
    path.write_text("item_id,price\n" + "".join(f"i{n},{n}.5\n" for n in range(20)) + "j,dear\n")
    columns = {"attributes.price": "price"}
    with pytest.raises(Invalid, match=r"line 22, attributes/price: must be a number \(got 'dear'"):
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
        ({"buyer": "SKU"}, {}, {}, "column buyer: is unknown; allowed are user_id, item_id"),
        ({**IDS, "attributes.x": "SKU"}, {}, {}, "attributes.x: is unknown"),
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
    """The message says which column was wanted, and which there are."""
    with pytest.raises(Invalid, match=problem):
        list(EventsFile(orders, mapped(columns, constants, **rest)).records())


def test_only_attributes_have_types() -> None:
    """A type of another field, or an unknown one, is refused."""
    for target in ("title:text", "attributes.x:date"):
        with pytest.raises(Invalid, match=f"--map {target}: only attributes have a type, one of"):
            FieldMapping.parse({target: "a"}, {})
