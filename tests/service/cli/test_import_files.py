"""Imports of exports as shops have them, through the command line and a real store."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from service.datasets.imports import ImportWarnings
from service.domain.records import Event
from tests.support.command_line import Heed, counts

pytestmark = pytest.mark.verify

PRODUCTS = """\
Stock Code;Description;Unit Price;Department
85123A;WHITE HANGING HEART;2,55;HOME
85123B;CAFÉ SIGN £5;1.234,50;Home
0007;;3,00;
"""
ORDERS = """\
Customer No;Stock Code;Qty;Order Date;Invoice
17850;85123A;6;01/12/2010 08:26;A
17850;85123A;6;01/12/2010 08:26;A
13047;85123B;-2;13/12/2010 09:01:30;B
13047;NOSUCH;5000;13/12/2010 9:01;B
;85123A;1;14/12/2010 10:00;C
13047;85123B;x;14/12/2010 10:00;C
13047;"85123B;1;14/12/2010 10:00;C
13047;85123A;1;14/12/2090 10:00;C
13048;85123A;1;31/06/2010 10:00;C
"""
EVENT_OPTIONS = (
    "--map", "user_id=customer no", "--map", "item_id=stock code", "--map", "timestamp=order date",
    "--weight-from", "Qty", "--negative", "return", "--constant", "type=purchase",
    "--timezone", "Europe/London",
)  # fmt: skip


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A wholesaler's exports: semicolons, Latin-1, Windows line ends, local times, dirt."""
    (tmp_path / "products.csv").write_bytes(PRODUCTS.replace("\n", "\r\n").encode("latin-1"))
    (tmp_path / "orders.csv").write_bytes(ORDERS.replace("\n", "\r\n").encode("latin-1"))
    return tmp_path


def stored(heed: Heed, what: str, folder: Path) -> list[dict[str, object]]:
    path = folder / f"{what}-out.jsonl"
    assert heed("export", what, path).code == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_catalogue_is_read_as_it_was_exported(heed: Heed, shop: Path) -> None:
    said = heed(
        "import", "items", shop / "products.csv", "--map", "item_id=Stock Code",
        "--map", "title=description", "--map", "attributes.price=Unit Price",
        "--map", "categories=Department",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "products.csv: cp1252, semicolons, decimal commas" in said.out
    assert "products.csv: 3 items stored, in" in said.out
    assert "attributes: price a number" in said.out
    assert "items without a title: 1: '0007'" in said.err
    assert "categories differ only in case: 'HOME' and 'Home'; filters, facets" in said.err
    by_id = {item["item_id"]: item for item in stored(heed, "items", shop)}
    assert by_id["85123B"]["title"] == "CAFÉ SIGN £5"
    assert by_id["85123B"]["attributes"] == {"price": 1234.5}
    assert by_id["0007"] == {"item_id": "0007", "attributes": {"price": 3}}


def test_a_dry_run_shows_and_stores_nothing(heed: Heed, shop: Path) -> None:
    said = heed("import", "events", shop / "orders.csv", *EVENT_OPTIONS, "--dry-run", "--skip-bad")
    assert said.code == 0, said.err
    assert "5 events (4 purchase, 1 return) would be stored, 4 bad rows refused" in said.out
    assert "2010-12-13T09:01:30Z" in said.out
    assert "they are stored, and recommended once the catalogue has them" in said.err
    assert "items of events that are not in the catalogue: 3, of 5 events" in said.err
    assert "events in the future: 1: 2090-12-14T10:00:00Z" in said.err
    assert "events of a weight above 1,000: 1: 5,000" in said.err
    assert "not read: Invoice" in said.err
    assert counts(shop / "data")["events"] == 0


def test_a_dry_run_shows_lists_and_objects_as_texts(
    heed: Heed, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Categories are joined by commas, and attributes stand beside their names."""
    monkeypatch.setenv("COLUMNS", "160")
    path = shop / "items.csv"
    path.write_text("id,categories,price\na,Home|Garden,1.5\n")
    options = ("--map", "item_id=id", "--map", "attributes.price=price")
    said = heed("import", "items", path, *options, "--dry-run")
    assert "Home, Garden" in said.out
    assert "price 1.5" in said.out
    assert not set("(){}'") & set(said.out.split("━")[-1])


def test_many_bad_rows_do_not_hide_the_rest(heed: Heed, shop: Path) -> None:
    path = shop / "blank.csv"
    path.write_text("user_id,item_id\n" + ",a\n" * 500 + "u,a\n")
    said = heed("import", "events", path, "--skip-bad")
    assert said.err.count("user_id: is required") == 20
    assert "skipped 500 rows in all; --rejects FILE keeps them, and why" in said.err


def test_bad_rows_are_kept_to_be_mended(heed: Heed, shop: Path) -> None:
    """Rejected rows stand under their header, and import after they are mended."""
    mapping, rejects = shop / "mapping.toml", shop / "bad.csv"
    said = heed(
        "import", "events", shop / "orders.csv", *EVENT_OPTIONS, "--skip-bad",
        "--rejects", rejects, "--save-mapping", mapping,
    )  # fmt: skip
    assert said.code == 0, said.err
    lines = ORDERS.splitlines()
    assert rejects.read_text().splitlines() == [lines[0], *lines[5:8], lines[9]]
    reasons = (shop / "bad.csv.reasons").read_text().splitlines()
    assert [reason.split("line ")[1].split(":")[0] for reason in reasons] == [
        "6, Customer No (user_id)", "7, Qty (weight)", "8", "10, Order Date (timestamp)",
    ]  # fmt: skip
    mended = rejects.read_text().replace('"', "").replace(";x;", ";3;").replace("31/06", "30/06")
    rejects.write_text(mended.replace("\n;85", "\n17850;85"))
    assert heed("import", "events", rejects, "--mapping", mapping).code == 0
    assert counts(shop / "data")["events"] == 9


def test_bad_rows_are_in_the_encoding_that_reads_them(heed: Heed, shop: Path) -> None:
    """The mapping that names it reads them after they are mended."""
    (shop / "c.csv").write_text("item_id;title;price\na;Löffel;x\nb;Öl;1,5\nc;Ei;2\n", "cp1252")
    mapping, bad = shop / "m.toml", shop / "bad.csv"
    items = ("import", "items", "--encoding", "cp1252", "--map", "attributes.price=price")
    heed(*items, shop / "c.csv", "--skip-bad", "--rejects", bad, "--save-mapping", mapping)
    bad.write_bytes(bad.read_bytes().replace(b";x", b";3"))
    assert heed("import", "items", bad, "--mapping", mapping).code == 0
    titles = [item["title"] for item in stored(heed, "items", shop)]
    assert titles == ["Löffel", "Öl", "Ei"]


def test_a_strict_import_stores_nothing_when_there_is_a_warning(
    heed: Heed,
    shop: Path,
) -> None:
    events = ("import", "events", shop / "good.csv", "--strict")
    (shop / "good.csv").write_text("user_id,item_id\nu,a\n")
    said = heed(*events)
    assert (said.code, counts(shop / "data")["events"]) == (1, 0)
    assert "not in the catalogue: 1, of 1 events: 'a'" in said.err
    (shop / "items.csv").write_text("item_id,title\na,A\n")
    assert heed("import", "items", shop / "items.csv", "--strict").code == 0
    assert heed(*events).code == 0
    assert counts(shop / "data")["events"] == 1


def test_times_that_do_not_exist_are_warned_of(heed: Heed, shop: Path) -> None:
    """A dry run, a strict import and an import name the file, the number and the first time."""
    (shop / "items.csv").write_text("item_id,title\na,A\n")
    heed("import", "items", shop / "items.csv")
    rows = [f"u,a,2011-03-27 01:{minute}\n" for minute in (30, 45)]
    (shop / "log.csv").write_text(
        "user_id,item_id,timestamp\nu,a,2011-03-27 03:00\n" + "".join(rows)
    )
    events = ("import", "events", shop / "log.csv", "--timezone", "Europe/London")
    warning = (
        "warning: log.csv: times that do not exist in Europe/London, as clocks are put forward: 2: "
        "'2011-03-27 01:30', taken as 2011-03-27T01:30:00Z"
    )
    for options, code, count in ((["--dry-run"], 0, 0), (["--strict"], 1, 0), ([], 0, 3)):
        said = heed(*events, *options)
        assert said.code == code
        assert said.err.count(warning) == 1
        assert counts(shop / "data")["events"] == count


NEWS = """\
item_id\ttitle\turl
N1\tPlain title\thttps://example.com/1
N2\t"Untold harbour story\thttps://example.com/2
N3\tSecond plain title\thttps://example.com/3
N4\tThird plain title"\thttps://example.com/4
"""


def test_no_quote_swallows_rows_in_silence(heed: Heed, shop: Path) -> None:
    """Quotes that are letters are found out and said; an option decides otherwise."""
    (shop / "news.tsv").write_text(NEWS)
    said = heed("import", "items", shop / "news.tsv", "--save-mapping", shop / "m.toml")
    assert "news.tsv: UTF-8, tabs, no quoted cells" in said.out
    titles = [item["title"] for item in stored(heed, "items", shop)]
    assert titles == [line.split("\t")[1] for line in NEWS.splitlines()[1:]]
    said = heed("import", "items", shop / "news.tsv", "--quotes", "--save-mapping", shop / "m.toml")
    assert "UTF-8, tabs, quoted cells" in said.out
    assert "2 items stored" in said.out
    assert "quotes = true" in (shop / "m.toml").read_text()
    said = heed("import", "items", shop / "news.tsv", "--no-quotes", "--mapping", shop / "m.toml")
    assert "4 items stored" in said.out
    (shop / "one.csv").write_text('item_id,title\na,A\nb,"B" b\n')
    said = heed("import", "items", shop / "one.csv")
    assert (said.code, "line 3: must be CSV" in said.err, "--no-quotes reads" in said.err) == (
        1, True, True,
    )  # fmt: skip


def test_a_line_for_spreadsheets_is_no_header(heed: Heed, shop: Path) -> None:
    """The delimiter that it names is used, and line numbers count it."""
    text = "\ufeffsep=;\nuser_id;item_id\nu,1;a\n;b\n"
    (shop / "sep.csv").write_text(text)
    rejects = shop / "bad.csv"
    said = heed("import", "events", shop / "sep.csv", "--skip-bad", "--rejects", rejects)
    assert "UTF-8, semicolons" in said.out
    assert "line 4, user_id: is required" in said.err
    assert [event["user_id"] for event in stored(heed, "events", shop)] == ["u,1"]
    assert rejects.read_text() == "user_id;item_id\n;b\n"


def test_rows_that_are_all_bad_are_an_error(heed: Heed, shop: Path) -> None:
    """Also those of a dry run, and with --skip-bad."""
    (shop / "bad.csv").write_text("user_id,item_id\n,a\n,b\n")
    for options in (["--dry-run"], []):
        said = heed("import", "events", shop / "bad.csv", "--skip-bad", *options)
        assert (said.code, "nothing is stored, since every row is bad: 2" in said.err) == (1, True)
    (shop / "empty.csv").write_text("user_id,item_id\n")
    assert heed("import", "events", shop / "empty.csv", "--skip-bad").code == 0


def test_ids_that_look_like_lists_are_warned_of(heed: Heed, shop: Path) -> None:
    """Several items in one cell make one item, which nobody meant; titles have commas."""
    ids = ["name:A|id:1;name:B|id:2", "A-1,B-2", '["a","b"]', "Paris, Texas", "1,234", "{3F-25}"]
    rows = [{"user_id": "u", "item_id": item_id} for item_id in [*ids, "https://a/b;c", *ids]]
    (shop / "a.json").write_text(json.dumps(rows))
    said = heed("import", "events", shop / "a.json", "--dry-run")
    warning = (
        "item ids that look like lists: 3: 'name:A|id:1;name:B|id:2', 'A-1,B-2', '[\"a\",\"b\"]'"
    )
    assert f"{warning}; an id is one item: write a row for each" in said.err


def test_ids_that_the_catalogue_spells_in_another_way_are_warned_of(heed: Heed, shop: Path) -> None:
    """Ids that hold several known ones, and what programs make of an id."""
    ids = ["A-1", "B-2", "00123", "12E4", "Paris", "7"]
    (shop / "i.csv").write_text("item_id,title\n" + "".join(f"{i},Thing\n" for i in ids))
    assert heed("import", "items", shop / "i.csv").code == 0
    odd = ["A-1, B-2", "A-1 x 2 + 00123", "7/A-1", "Paris, Texas", "123", "12e4", "007", "9"]
    odd += ["7.0", "Par\u200bis"]
    (shop / "e.csv").write_text("user_id;item_id\n" + "".join(f"u;{i}\n" for i in [*ids, *odd]))
    said = heed("import", "events", shop / "e.csv", "--dry-run")
    lists = "'A-1, B-2', 'A-1 x 2 + 00123', '7/A-1'"
    spelt = "'123' for '00123', '12e4' for '12E4', '007' for '7'"
    assert f"item ids that look like lists: 3: {lists}; an id is one item" in said.err
    unseen = r"'7.0' for '7', 'Par\u200bis' for 'Paris'"
    assert f"characters that are not seen: 5: {spelt}, {unseen}; they are other" in said.err
    (shop / "stock.csv").write_text("item_id,stock,size\n123,1,\n9,1,\n")
    maps = ("--map", "attributes.stock=stock", "--map", "attributes.size=size")
    said = heed("import", "items", shop / "stock.csv", "--update", "--dry-run", *maps)
    assert "attributes: stock a number, size empty" in said.out
    assert "only in letter case, zeros in front, .0 behind or characters" in said.err
    assert "not seen: 1: '123' for '00123'" in said.err


def test_two_nights_are_stored_once_and_undone(heed: Heed, shop: Path) -> None:
    """Overlapping exports, one of them packed; undoing the second restores the first."""
    rows = ORDERS.splitlines()
    (shop / "one.csv").write_text("\n".join(rows[:5]))
    with gzip.open(shop / "two.csv.gz", "wt") as file:
        file.write("\n".join([rows[0], rows[4], rows[1], rows[2], rows[8]]))
    assert heed("import", "events", shop / "one.csv", *EVENT_OPTIONS).code == 0
    before = stored(heed, "events", shop)
    said = heed("import", "events", shop / "two.csv.gz", *EVENT_OPTIONS)
    assert "1 events stored, 3 were there already" in said.out
    listed = heed("import", "--list").out
    assert "one.csv" in listed
    assert "two.csv.gz" in listed
    said = heed("import", "--undo", "2")
    assert "Import 2 undone: 1 events, 0 items and 0 profiles taken back." in said.out
    assert stored(heed, "events", shop) == before
    assert "undone" in heed("import", "--list").out
    said = heed("import", "--undo", "2")
    assert (said.code, "import 2 is undone already" in said.err) == (1, True)


def test_an_older_night_is_undone_but_for_what_a_later_one_has(heed: Heed, shop: Path) -> None:
    """Undoing the first of two overlapping exports leaves the second, and says what stays."""
    rows = ORDERS.splitlines()
    nights = {"one": [1, 2, 3, 4], "two": [4, 1, 2, 8]}
    for name, numbers in nights.items():
        (shop / f"{name}.csv").write_text("\n".join(rows[number] for number in (0, *numbers)))
    assert heed("import", "events", shop / "two.csv", *EVENT_OPTIONS).code == 0
    second = stored(heed, "events", shop)
    assert heed("import", "--undo", "1").code == 0
    for name in nights:
        assert heed("import", "events", shop / f"{name}.csv", *EVENT_OPTIONS).code == 0
    said = heed("import", "--undo", "2")
    assert "Import 2 undone: 1 events, 0 items and 0 profiles taken back." in said.out
    assert "3 events stay, since other imports have them too." in said.out
    remaining = stored(heed, "events", shop)
    assert sorted(map(str, remaining)) == sorted(map(str, second))


def test_several_files_and_a_pipe_are_one_import(shop: Path) -> None:
    """- reads standard input, whose format is found out."""
    data = shop / "data"
    (shop / "a.jsonl").write_text('{"user_id":"u","item_id":"a"}\n')
    for number, text in enumerate(("user_id;item_id\nu;b\n", '{"user_id":"u","item_id":"c"}')):
        command = [sys.executable, "-m", "service.cli", "import", "events", "-"]
        done = subprocess.run(
            [*command, *([str(shop / "a.jsonl")] * (1 - number)), "--data", str(data)],
            input=text.encode(),
            check=True,
            capture_output=True,
        )
        assert b"-: 1 events stored, 0 were there already" in done.stdout
    assert counts(data)["events"] == 3


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        ("user_id,user_id,item_id\n", (), "-, column user_id: must not occur twice"),
        ("user,item_id\nu,a\n", (), "-, column user_id: is required"),
        ("user_id,item_id,timestamp\nu,a,soon\n", (), "-: no known format of times fits 'soon'"),
        ("user_id,item_id\nu,a\n", ("--map", "type=kind"), "-: --map: there is no column 'kind'"),
        ("user_id,item_id\n,a\n", (), "-, line 2, user_id: is required"),
        ("PAR1", (), "- cannot be read as Parquet"),
    ],
)
def test_errors_of_a_pipe_name_the_pipe(
    heed: Heed, monkeypatch: pytest.MonkeyPatch, text: str, options: tuple[str, ...], problem: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    said = heed("import", "events", "-", *options)
    assert said.code == 1
    assert problem in said.err
    assert "heed-import-" not in said.err  # the folder of the copy of the pipe


def test_an_import_that_stops_says_how_to_take_it_back(
    heed: Heed, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = heed("import", "events", shop / "orders.csv", *EVENT_OPTIONS)
    assert said.code == 1
    assert "Import 1 stopped; nothing is stored." in said.err
    assert "line 6, Customer No (user_id): is required" in said.err

    path = shop / "events.jsonl"
    path.write_text("".join(f'{{"user_id":"u","item_id":"i{n}"}}\n' for n in range(4_500)))
    with path.open("a") as file:
        file.write("no event\n")
    said = heed("import", "events", path)
    assert said.code == 1
    assert "Import 2 stopped after 4,000 events; they stay, and heed import --undo 2" in said.err

    def events(_: ImportWarnings, stream: Iterator[Event]) -> Iterator[Event]:
        yield from islice(stream, 4_200)
        signal.raise_signal(signal.SIGINT)
        yield from stream

    monkeypatch.setattr(ImportWarnings, "events", events)
    said = heed("import", "events", path, "--skip-bad")
    assert "Import 3 stopped after 4,000 events" in said.err
    listed = heed("import", "--list").out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[4:-1]] for line in listed if "jsonl" in line]
    assert rows == [["4,000", "0", "0", "kept"], ["0", "0", "0", "kept"]]


def test_a_change_of_stock_sends_the_stock_alone(heed: Heed, shop: Path) -> None:
    """--update changes the columns that the file has, and a blank cell empties its field."""
    full = {"item_id": "a", "title": "A", "categories": ["x"], "attributes": {"price": 2, "old": 1}}
    (shop / "items.jsonl").write_text(json.dumps(full))
    heed("import", "items", shop / "items.jsonl")
    (shop / "stock.csv").write_text("item_id,stock,old\na,7,\nb,3,1\n")
    mapped = ("--map", "attributes.stock=stock", "--map", "attributes.old=old")
    said = heed("import", "items", shop / "stock.csv", "--update", *mapped)
    assert (said.code, "2 items updated" in said.out) == (0, True)
    first, second = stored(heed, "items", shop)
    assert first == full | {"attributes": {"price": 2, "stock": 7}}
    assert second == {"item_id": "b", "attributes": {"stock": 3, "old": 1}}
    (shop / "hide.jsonl").write_text('{"item_id":"a","hidden":true,"title":null}')
    assert heed("import", "items", shop / "hide.jsonl", "--update").code == 0
    assert stored(heed, "items", shop)[0]["hidden"] is True
    assert heed("import", "--undo", "2").code == 0
    assert [item["item_id"] for item in stored(heed, "items", shop)] == ["a"]


def test_rejected_rows_are_those_of_the_last_import(heed: Heed, shop: Path) -> None:
    """With --strict, whose check reads everything first, a bad row is kept once; old ones go."""
    (shop / "items.csv").write_text("item_id,title\na,A\n")
    heed("import", "items", shop / "items.csv")
    (shop / "log.csv").write_text("user_id,item_id\nu,a\n,a\n")
    rejects = shop / "bad.csv"
    events = ("import", "events", shop / "log.csv", "--skip-bad", "--rejects", rejects, "--strict")
    assert heed(*events).code == 0
    assert rejects.read_text() == "user_id,item_id\n,a\n"
    (shop / "log.csv").write_text("user_id,item_id\nu,a\n")
    said = heed(*events)
    assert (said.code, "bad rows are in" in said.err, rejects.read_text()) == (0, False, "")


def test_imports_give_requests_the_processor_first(
    heed: Heed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import sets the niceness of its process to at least 10, before it opens the store."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "setpriority", lambda *values: made.append(values))
    file = tmp_path / "events.jsonl"
    file.write_text('{"user_id": "u", "item_id": "i"}\n')
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert heed("import", "events", file).code == 0
    process, *threads = made
    assert process == (os.PRIO_PROCESS, 0, max(own, 10))
    assert all(thread > 0 for _, thread, _ in threads)


SHOPIFY = """\
Handle,Title,Tags,Price,Size
mug,Harbour Mug,"blue, gift",15.00,L
print,Gull Print,art,15.00,
mug,,"gift, sea",12.00,
mug,,,,S
"""
SHOPIFY_OPTIONS = (
    "--map", "item_id=Handle", "--map", "attributes.price=Price", "--map",
    "attributes.size=Size", "--list-separator", ",",
)  # fmt: skip


def test_values_left_out_are_named_or_said_to_be_more(heed: Heed, shop: Path) -> None:
    for count, end in (
        (5, "'e' title 'E' then 'X'; to keep"),
        (6, "'e' title 'E' then 'X', …; to"),
    ):
        rows = [f"{name},{title}" for name in "abcdef"[:count] for title in (name.upper(), "X")]
        (shop / "many.csv").write_text("\n".join(["item_id,title", *rows]))
        said = heed("import", "items", shop / "many.csv", "--dry-run")
        assert f"has another: {count}: " in said.err
        assert end in said.err


def test_rows_of_one_item_are_put_together(heed: Heed, shop: Path) -> None:
    """Lists unite, the first value stays, others are named; a dry run counts as the import does."""
    (shop / "export.csv").write_text(SHOPIFY)
    items = ("import", "items", shop / "export.csv", *SHOPIFY_OPTIONS)
    differing = (
        "export.csv: values left out, since an earlier row of the id has another: 2: 'mug' "
        "attributes.price 15.0 then 12.0, 'mug' attributes.size 'L' then 'S'; to keep the last "
        "value, sort the file so that its row comes first"
    )
    dry = heed(*items, "--dry-run")
    assert "2 items would be stored" in dry.out
    assert "0 left out, rows put together with earlier ones of their id: 2." in dry.out
    assert differing in dry.err
    said = heed(*items)
    assert "export.csv: 2 items stored, in" in said.out
    assert "; rows put together with earlier ones of their id: 2" in said.out
    assert differing in said.err
    by_id = {item["item_id"]: item for item in stored(heed, "items", shop)}
    assert by_id["mug"] == {
        "item_id": "mug", "title": "Harbour Mug", "tags": ["blue", "gift", "sea"],
        "attributes": {"price": 15.0, "size": "L"},
    }  # fmt: skip


def test_tags_of_one_film_each_are_put_together_by_an_update(heed: Heed, shop: Path) -> None:
    """As MovieLens has them, one tag a row in the order of the users: titles stay."""
    (shop / "movies.jsonl").write_text(
        '{"item_id":"1","title":"Harbour Story","tags":["old"]}\n{"item_id":"2","title":"Ferry"}\n'
    )
    heed("import", "items", shop / "movies.jsonl")
    (shop / "tags.csv").write_text(
        'userId,movieId,tag\n3,1,classic\n4,2,slow\n3,1,sci-fi\n4,1,"dark, comedy"\n'
    )
    tags = ("import", "items", shop / "tags.csv", "--map", "item_id=movieId", "--map", "tags=tag")
    assert "2 items would be stored" in heed(*tags, "--update", "--dry-run").out
    assert (
        "2 items updated; rows put together with earlier ones of their id: 2"
        in heed(*tags, "--update").out
    )
    assert stored(heed, "items", shop) == [
        {"item_id": "1", "title": "Harbour Story", "tags": ["classic", "sci-fi", "dark, comedy"]},
        {"item_id": "2", "title": "Ferry", "tags": ["slow"]},
    ]


def test_rows_of_one_user_are_put_together(heed: Heed, shop: Path) -> None:
    """Interests unite, and so do attributes."""
    (shop / "users.csv").write_text("user_id,interests,town\nu,a,\nu,b,Bern\nv,a,Rome\nu,a,Oslo\n")
    said = heed("import", "users", shop / "users.csv", "--map", "attributes.town=town")
    assert "2 profiles stored; rows put together with earlier ones of their id: 2" in said.out
    assert "the id has another: 1: 'u' attributes.town 'Bern' then 'Oslo'" in said.err
    assert stored(heed, "users", shop) == [
        {"user_id": "u", "attributes": {"town": "Bern"}, "interests": ["a", "b"]},
        {"user_id": "v", "attributes": {"town": "Rome"}, "interests": ["a"]},
    ]


def test_rows_that_make_a_list_too_long_are_bad(heed: Heed, shop: Path) -> None:
    rows = "".join(f"a,t{number}\n" for number in range(1_001))
    (shop / "tags.csv").write_text(f"item_id,tags\n{rows}")
    said = heed("import", "items", shop / "tags.csv", "--skip-bad")
    assert "line 1002, tags: has 1,001 entries with those of earlier rows of this id" in said.err
    assert len(stored(heed, "items", shop)[0]["tags"]) == 1_000  # type: ignore[arg-type]


def test_an_update_names_what_it_creates_and_can_refuse(heed: Heed, shop: Path) -> None:
    """--existing-only makes a row of an unknown item a bad row."""
    (shop / "items.csv").write_text("item_id,title\ni1,Item\n")
    heed("import", "items", shop / "items.csv")
    (shop / "stock.csv").write_text("item_id,stock\ni1,5\nghost-sku,7\n")
    stock = ("import", "items", shop / "stock.csv", "--map", "attributes.stock=stock", "--update")
    warning = "items that the catalogue does not have: 1: 'ghost-sku'; --update creates them"
    assert warning in heed(*stock, "--dry-run").err
    said = heed(*stock, "--existing-only")
    assert (said.code, counts(shop / "data")["items"]) == (1, 1)
    assert "line 3, item_id: is not in the catalogue (got 'ghost-sku')" in said.err
    said = heed(*stock, "--existing-only", "--skip-bad")
    assert (said.code, "1 items updated" in said.out) == (0, True)
    assert "without a title" not in said.err
    said = heed(*stock)
    assert (said.code, warning in said.err, counts(shop / "data")["items"]) == (0, True, 2)
    said = heed(*stock[:-1], "--existing-only")
    assert (said.code, "--existing-only needs --update" in said.err) == (1, True)
    said = heed(*stock[:-1], "--dry-run")
    assert "items that lose their titles, since a row replaces all of its item: 1: 'i1'" in said.err
    assert "lose" not in heed(*stock[:-1], "--dry-run", "--constant", "title=T").err
    (shop / "stock.jsonl").write_text('{"item_id": "i1", "attributes": {"stock": 5}}')
    assert "all of its item: 1: 'i1'" in heed("import", "items", shop / "stock.jsonl").err


def test_an_import_into_a_foreign_catalogue_asks(
    heed: Heed, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal it asks; elsewhere it warns. A catalogue with some of the items is theirs."""
    (shop / "films.csv").write_text("item_id,title\n1,Toy Story\n2,Heat\n")
    heed("import", "items", shop / "films.csv")
    (shop / "goods.csv").write_text("item_id,title\nmug,Mug\n")
    goods = ("import", "items", shop / "goods.csv")
    warning = f"{shop / 'data'} has 2 items, of films.csv, and none of these 1: all would be"
    assert warning in heed(*goods, "--dry-run").err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text))
    said = heed(*goods)
    assert (said.code, warning in said.err, asked) == (0, True, ["Import into it?"])
    assert warning not in heed(*goods).err
    (shop / "more.csv").write_text("item_id,title\nmug,Mug\njug,Jug\n")
    assert "none of these" not in heed("import", "items", shop / "more.csv").err
    assert len(asked) == 1


def test_an_item_of_two_files_is_the_later_ones(heed: Heed, shop: Path) -> None:
    for name, title in (("one", "A"), ("two", "B")):
        (shop / f"{name}.csv").write_text(f"item_id,title\na,{title}\n")
    said = heed("import", "items", shop / "one.csv", shop / "two.csv")
    assert "items of an earlier file of this import: 1: 'a'; the later file" in said.err
    assert stored(heed, "items", shop) == [{"item_id": "a", "title": "B"}]


def test_events_can_make_items(heed: Heed, shop: Path) -> None:
    """--create-items, whose items have the fields of their rows, and go when it is undone."""
    (shop / "items.csv").write_text("item_id,title\nt1,Known\n")
    heed("import", "items", shop / "items.csv")
    (shop / "plays.csv").write_text("user,track,name\nu,t1,Other\nu,t2,Intro\nv,t2,Intro\n")
    plays = (
        "import", "events", shop / "plays.csv", "--map", "user_id=user", "--map",
        "item_id=track", "--map", "title=name", "--create-items",
    )  # fmt: skip
    said = heed(*plays, "--dry-run")
    assert "3 events (3 view) would be stored, 1 items created, 0 bad rows" in said.out
    assert "not read" not in said.err
    said = heed(*plays)
    assert "plays.csv: 1 items, 3 events stored" in said.out
    assert "not in the catalogue" not in said.err
    titles = [(item["item_id"], item["title"]) for item in stored(heed, "items", shop)]
    assert titles == [("t1", "Known"), ("t2", "Intro")]
    heed("import", "--undo", "2")
    assert counts(shop / "data") == {"users": 0, "items": 1, "events": 0}


def test_what_ratings_and_missing_times_mean_is_said(heed: Heed, shop: Path) -> None:
    """Zeros that become dislikes, stars that become weights, events that become the newest."""
    (shop / "log.csv").write_text(
        "user_id,item_id,stars,timestamp\nu,a,0,2024-01-01T00:00:00Z\nu,b,5,\nv,a,3,\nv,b,,\n"
    )
    log = ("import", "events", shop / "log.csv", "--dry-run")
    said = heed(*log)
    assert "not read: stars. --map FIELD=COLUMN reads one; --map rating=stars" in said.err
    assert "attributes.NAME" not in said.err
    assert "events without a time: 3 of 4; they get the time of the import" in said.err
    said = heed(*log, "--map", "rating=stars", "--dislikes-below", "3")
    assert (
        "ratings of 0: 1, stored as dislikes; if 0 stands for no rating, --absent 0 reads"
        in said.err
    )
    assert "log.csv: events without a rating: 1, stored like those that are no dislikes" in said.err
    said = heed(*log, "--weight-from", "stars", "--skip-bad")
    assert "log.csv: stars looks like ratings, and is read as weights" in said.err
    assert "line 2, stars (weight): must be above 0 (got 0); leave out an event" in said.err
    assert "(got '0')" not in said.err
    (shop / "log.csv").write_text("user_id,item_id\nu,a\nu,b\n")
    said = heed(*log)
    assert (
        "no event has a time: all 2 get the time of the import, newer than what is stored, in no "
        "order of a user's own; a training learns without an order if they are half of its log or "
        "more, else takes them for older than events with times"
    ) in " ".join(said.out.split())
