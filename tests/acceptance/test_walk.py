"""A new user's way with a wholesaler's exports: from dirty files to answers with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.heed_process import HeedProcess
from tests.support.server import Server
from tests.support.shop_exports import (
    ORDER_OPTIONS,
    PRODUCT_OPTIONS,
    Exports,
    Sale,
    write_exports,
)


class Shop(NamedTuple):
    """The exports, and the data directory that they are imported into."""

    exports: Exports
    data: Path

    def heed(self, *arguments: object) -> str:
        """Run a command that must end well, and return what it printed."""
        log = self.data.with_name("commands.log")
        process = HeedProcess(
            *arguments,
            log=log,
            environment={"HEED_DATA": str(self.data), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        )
        code, said = process.wait(), process.out()
        assert code == 0, log.read_text()
        return said

    def stored(self) -> Counter[Sale]:
        """The stored events."""
        store = SQLiteStore(self.data / STORE_FILE)
        return Counter(
            Sale(each.user_id, each.item_id, each.type, each.timestamp or 0, round(each.weight, 6))
            for each in store.scan_events()
        )


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The catalogue and the first night, imported; the mapping is kept in a file."""
    folder = tmp_path_factory.mktemp("shop")
    made = Shop(write_exports(folder), folder / "data")
    made.heed("import", "items", made.exports.products, *PRODUCT_OPTIONS)
    mapping = folder / "mapping.toml"
    first = made.exports.nights[0]
    shown = made.heed("import", "events", first, *ORDER_OPTIONS, "--dry-run", "--skip-bad")
    lines, bad = sum(made.exports.sales[0].values()), made.exports.bad_rows[0]
    assert f"{lines:,} events" in shown
    assert f"{bad} bad rows refused" in shown
    assert not made.stored()
    made.heed("import", "events", first, *ORDER_OPTIONS, "--skip-bad", "--save-mapping", mapping)
    return made


@pytest.fixture(scope="module")
def nights(shop: Shop) -> Shop:
    """Both nights, of which the second is imported by the mapping."""
    assert shop.stored() == shop.exports.sales[0]
    mapping, rejects = shop.data.with_name("mapping.toml"), shop.data.with_name("bad.csv")
    options = ("--mapping", mapping, "--skip-bad", "--rejects", rejects)
    shop.heed("import", "events", shop.exports.nights[1], *options)
    assert len(rejects.read_text("utf-8-sig").splitlines()) == 1 + shop.exports.bad_rows[1]
    return shop


@pytest.fixture(scope="module")
def http(nights: Shop) -> Iterator[httpx.Client]:
    """A client of the shop, with a trained model."""
    nights.heed("train", "--epochs", "4", "--processes", "1")
    with Server(nights.data) as server, server.client() as client:
        yield client
    assert "Traceback" not in server.log()


def test_two_nights_are_their_union(nights: Shop) -> None:
    """Overlapping exports are stored once, again and in the other order too; undo restores."""
    union = nights.exports.stored
    assert nights.stored() == union
    mapping = nights.data.with_name("mapping.toml")
    listed = nights.heed("import", "--list")
    last = max(int(line.split("│")[1]) for line in listed.splitlines() if line.startswith("│"))
    nights.heed("import", "--undo", last)
    assert nights.stored() == nights.exports.sales[0]
    both = nights.exports.nights[::-1]
    nights.heed("import", "events", *both, "--mapping", mapping, "--skip-bad")
    assert nights.stored() == union


def test_the_catalogue_is_as_the_export_means_it(http: httpx.Client, nights: Shop) -> None:
    """Prices with decimal commas are numbers, Latin-1 letters are letters, lists are sorted."""
    exports = nights.exports
    cheap = {"field": "attributes.price", "lt": 5}
    body = {"filter": cheap, "fields": ["attributes.price"], "limit": 200}
    found = http.post("/v1/search", json=body | {"sort": [{"field": "attributes.price"}]}).json()[
        "items"
    ]
    prices = [item["fields"]["attributes.price"] for item in found]
    assert prices == sorted(price for price in exports.prices.values() if price < 5)
    facets = [{"field": "categories", "limit": 20}]
    answer = http.post("/v1/search", json={"facets": facets, "limit": 1}).json()
    counted = Counter({each["value"]: each["count"] for each in answer["facets"][0]["values"]})
    folded: Counter[str] = Counter()
    for value, count in counted.items():
        folded[value.casefold()] += count
    assert folded == Counter(name.casefold() for name in exports.departments.values())


def test_recommendations_keep_to_the_department_of_a_customer(
    http: httpx.Client, nights: Shop
) -> None:
    """Customers who keep to a department are shown it, with reasons that raised the score."""
    of = nights.exports.departments
    bought: dict[str, Counter[str]] = {}
    for sale in nights.exports.stored:
        if sale.item_id in of and sale.type == "purchase":
            bought.setdefault(sale.user_id, Counter())[of[sale.item_id]] += 1
    right = shown = 0
    for user, departments in sorted(bought.items())[:40]:
        body = {"user_id": user, "limit": 5, "explain": 2}
        answer = http.post("/v1/recommend", json=body)
        assert answer.status_code == 200, answer.text
        for item in answer.json()["items"]:
            shown += 1
            right += of[item["item_id"]] in dict(departments.most_common(2))
            raising = [each for each in item["explanation"] if each["contribution"] > 0]
            assert len({each["event_id"] for each in raising}) == len(raising)
            assert sum(item["parts"].values()) == pytest.approx(item["score"], abs=1e-4)
    assert right > 0.8 * shown


def test_a_home_page_has_rows_within_a_budget(http: httpx.Client, nights: Shop) -> None:
    """Rows keep to a price and to two items of a department, name their rule, and have reasons."""
    exports = nights.exports
    prices = exports.prices
    cheap = {"field": "attributes.price", "lt": 6}
    garden = {"field": "categories", "in": ["Garden", "GARDEN"]}
    body = {
        "rows": 3,
        "limit": 6,
        "filter": cheap,
        "rules": [{"name": "spring", "when": garden, "boost": 1.5}],
        "at_most": [{"field": "categories", "count": 2}],
        "fields": ["attributes.price", "categories"],
        "at": "2025-04-17T12:00:00Z",
    }
    kinds: Counter[str] = Counter()
    for user in sorted({sale.user_id for sale in exports.stored})[:12]:
        answer = http.post("/v1/rows", json=body | {"user_id": user})
        assert answer.status_code == 200, answer.text
        rows = answer.json()["rows"]
        assert len(rows) == 3
        items = [item for row in rows for item in row["items"]]
        assert len({item["item_id"] for item in items}) == len(items)
        for item in items:
            assert item["fields"]["attributes.price"] == prices[item["item_id"]] < 6
            assert sum(item["parts"].values()) == pytest.approx(item["score"], abs=1e-4)
            is_spring = exports.departments[item["item_id"]] == "Garden"
            assert [rule["name"] for rule in item.get("rules", [])] == ["spring"] * is_spring
        for row in rows:
            shared = Counter(name for item in row["items"] for name in item["fields"]["categories"])
            assert max(shared.values()) <= 2
            kinds[row["reason"]["kind"]] += 1
            if row["reason"]["kind"] == "because":
                history = http.get(f"/v1/users/{user}/history?limit=1000").json()["events"]
                events = {each["event_id"]: each["item_id"] for each in history}
                named = {events[event] for event in row["reason"]["event_ids"]}
                assert named == {row["reason"]["item_id"]}
    assert kinds["because"] >= 12
