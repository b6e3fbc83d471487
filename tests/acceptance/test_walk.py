"""A new user's walk from an invented shop's exports to home pages, by docs/start.md only.

The commands and the request run as they are written there, so that the page is all that a user
needs.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.heed_process import ROOT, HeedProcess
from tests.support.server import Server
from tests.support.shop_exports import Sale, invented, write_exports

PORT = 8000  # as the page writes it
CUSTOMERS = 12  # whose home pages are checked

Pages = list[dict[str, Any]]


class Guide(NamedTuple):
    """The commands, the request and the answer of docs/start.md."""

    commands: list[list[str]]  # arguments of `heed`, one after the other
    request: str  # a shell command
    body: dict[str, Any]  # of the request
    shown: dict[str, Any]  # the beginning of its answer


def read_guide() -> Guide:
    """Read docs/start.md: blocks of commands, one with the request, and one with its answer."""
    page = (ROOT / "docs" / "start.md").read_text("utf-8")
    shells = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (request,) = (block for block in shells if "curl" in block)
    (shown,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = "".join(block for block in shells if block != request).replace("\\\n", " ").split("\n")
    words = (shlex.split(line, comments=True) for line in lines)
    heed = [line[1:] for line in words if line and line[0] == "heed"]
    body = re.search(r"-d '(.*?)'", request, re.DOTALL)
    assert body is not None
    return Guide(heed, request, json.loads(body[1]), json.loads(re.sub(r",?\s*…", "", shown)))


class Walk:
    """The walk over the exports of a shop, which are written into a folder."""

    def __init__(self, folder: Path) -> None:
        self.guide = read_guide()
        self.exports = write_exports(invented(), folder)
        self.data = folder / "data"
        self.dry: list[int] = []  # records that the dry runs have stored
        self.nights: list[Counter[Sale]] = []  # events after each import of them
        self.bad: list[int] = []  # rows that each of these imports has kept
        self._folder = folder

    def heed(self, *arguments: str) -> str:
        """Run a command that must end well; return what it printed."""
        files = [
            name
            for word in arguments
            for name in (sorted(each.name for each in self._folder.glob(word)) or [word])
        ]
        log = self._folder / "commands.log"
        environment = {"HEED_DATA": str(self.data), "COLUMNS": "200"}
        process = HeedProcess(*files, log=log, environment=environment, folder=self._folder)
        assert process.wait() == 0, f"heed {shlex.join(arguments)}: {log.read_text()}"
        return process.out()

    def stored(self) -> Counter[Sale]:
        store = SQLiteStore(self.data / STORE_FILE)
        return Counter(
            Sale(each.user_id, each.item_id, each.type, each.timestamp or 0, round(each.weight, 6))
            for each in store.scan_events()
        )

    def store(self) -> None:
        """Run the commands that come before the training, then undo and repeat the last import."""
        for command in self.guide.commands:
            if command[0] != "import":
                continue
            before = sum(self.stored().values()) if self.data.exists() else 0
            self.heed(*command)
            if "--dry-run" in command:
                self.dry.append(sum(self.stored().values()) - before)
            elif command[1] == "events":
                self.nights.append(self.stored())
                rejects = self._folder / command[command.index("--rejects") + 1]
                self.bad.append(len(rejects.read_text("utf-8-sig").splitlines()) - 1)
        listed = self.heed("import", "--list").splitlines()
        last = max(int(line.split("│")[1]) for line in listed if line.startswith("│"))
        self.heed("import", "--undo", str(last))
        self.undone = self.stored()
        again = [command for command in self.guide.commands if command[:2] == ["import", "events"]]
        for command in (again[-1], again[-2]):
            self.heed(*command)
        self.again = self.stored()


class Walked(NamedTuple):
    """A walk that was gone to its end, and the service at its end."""

    walk: Walk
    http: httpx.Client
    pages: Pages  # home pages of some customers: the same request for each


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """A walk until the exports are stored."""
    walk = Walk(tmp_path_factory.mktemp("shop"))
    walk.store()
    return walk


@pytest.fixture(scope="module")
def walked(stored: Walk) -> Iterator[Walked]:
    """The service with a trained model."""
    (train,) = (each for each in stored.guide.commands if each[0] == "train")
    stored.heed(*train, "--epochs", "4", "--processes", "1")
    assert ["serve"] in stored.guide.commands
    pages = []
    with Server(stored.data) as server, server.client() as http:
        for user in sorted({sale.user_id for sale in stored.exports.stored})[:CUSTOMERS]:
            answer = http.post("/v1/rows", json=stored.guide.body | {"user_id": user})
            assert answer.status_code == 200, answer.text
            history = http.get(f"/v1/users/{user}/history?limit=1000").json()["events"]
            pages.append(answer.json() | {"history": history})
        yield Walked(stored, http, pages)
    assert "Traceback" not in server.log()


def test_exports_are_stored_once(stored: Walk) -> None:
    """Dry runs store nothing, overlapping nights are stored as their union, bad rows are kept."""
    assert stored.dry == [0] * len(stored.dry)
    assert stored.nights == [stored.exports.sales[0], stored.exports.stored]
    assert stored.bad == list(stored.exports.bad_rows)


def test_an_undone_import_leaves_the_one_before(stored: Walk) -> None:
    """Undoing the last night leaves the first; in the other order, both are their union again."""
    assert stored.undone == stored.exports.sales[0]
    assert stored.again == stored.exports.stored


def test_the_page_shows_the_answer(walked: Walked) -> None:
    """The answer to the request has all that docs/start.md shows of it."""
    guide, address = walked.walk.guide, walked.http.base_url.netloc.decode()
    request = guide.request.replace(f"localhost:{PORT}", address)
    ran = subprocess.run(["bash", "-c", request], check=True, capture_output=True)
    assert _fits(guide.shown, json.loads(ran.stdout))


def test_rows_have_no_item_twice_or_above_the_price(walked: Walked) -> None:
    """Every page has as many rows as requested, no item twice, and no item above the price."""
    body = walked.walk.guide.body
    for page in walked.pages:
        assert len(page["rows"]) == body["rows"]
        ids = [item["item_id"] for item in _items(page)]
        assert len(set(ids)) == len(ids)
        assert max(walked.walk.exports.prices[each] for each in ids) < body["filter"]["lt"]


def test_a_row_has_few_items_of_a_department(walked: Walked) -> None:
    """No row has more items of a department than allowed."""
    (quota,) = walked.walk.guide.body["at_most"]
    for page in walked.pages:
        for row in page["rows"]:
            shared = Counter(name for item in row["items"] for name in _departments(item))
            assert max(shared.values()) <= quota["count"]


def test_boosts_are_parts_of_scores(walked: Walked) -> None:
    """A boost raises the items that its rule holds for, and no others, and all parts add up."""
    (rule,) = walked.walk.guide.body["rules"]
    boosted = 0
    for item in (item for page in walked.pages for item in _items(page)):
        holds = rule["when"]["eq"] in _departments(item)
        assert [each["name"] for each in item.get("rules", [])] == [rule["name"]] * holds
        assert all(each["boost"] == rule["boost"] for each in item.get("rules", []))
        assert (item["parts"]["rules"] > 0) == holds
        assert abs(sum(item["parts"].values()) - item["score"]) < 1e-4 * max(1, abs(item["score"]))
        boosted += holds
    assert boosted


def test_reasons_are_true(walked: Walked) -> None:
    """A reason names an item of the history, once on a page, that raised all scores of its row."""
    rows = 0
    for page in walked.pages:
        bought = {event["event_id"]: event["item_id"] for event in page["history"]}
        because = [row for row in page["rows"] if row["reason"]["kind"] == "because"]
        named = [row["reason"]["item_id"] for row in because]
        assert len(set(named)) == len(named)
        for row in because:
            assert {bought[each] for each in row["reason"]["event_ids"]} == {
                row["reason"]["item_id"]
            }
            for item in row["items"]:
                events = [each["event_id"] for each in item["explanation"]]
                assert len(set(events)) == len(events)
                assert {bought[each] for each in events} == {row["reason"]["item_id"]}
                assert sum(each["contribution"] for each in item["explanation"]) > 0
        rows += len(because)
    assert rows >= len(walked.pages)


def test_the_catalogue_is_as_the_export_means_it(walked: Walked) -> None:
    """Prices with decimal commas are numbers, Latin-1 letters are letters, lists are sorted."""
    exports, http = walked.walk.exports, walked.http
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


def test_recommendations_keep_to_the_department_of_a_customer(walked: Walked) -> None:
    """Customers who keep to a department are shown it, with reasons that raised the score."""
    of = walked.walk.exports.departments
    bought: dict[str, Counter[str]] = {}
    for sale in walked.walk.exports.stored:
        if sale.item_id in of and sale.type == "purchase":
            bought.setdefault(sale.user_id, Counter())[of[sale.item_id]] += 1
    right = shown = 0
    for user, departments in sorted(bought.items())[:40]:
        body = {"user_id": user, "limit": 5, "explain": 2}
        answer = walked.http.post("/v1/recommend", json=body)
        assert answer.status_code == 200, answer.text
        for item in answer.json()["items"]:
            shown += 1
            right += of[item["item_id"]] in dict(departments.most_common(2))
            raising = [each for each in item["explanation"] if each["contribution"] > 0]
            assert len({each["event_id"] for each in raising}) == len(raising)
            assert sum(item["parts"].values()) == pytest.approx(item["score"], abs=1e-4)
    assert right > 0.8 * shown


def _items(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for row in page["rows"] for item in row["items"]]


def _departments(item: dict[str, Any]) -> list[str]:
    names: list[str] = item["fields"]["categories"]
    return names


def _fits(shown: Any, answer: Any) -> bool:
    """Whether an answer has all fields of the shown one; each member of a list, some alike."""
    if isinstance(shown, dict):
        # Only a model whose held-out events it helps has a similarity part.
        names = [name for name in shown if name != "similarity"]
        return isinstance(answer, dict) and all(
            name in answer and _fits(shown[name], answer[name]) for name in names
        )
    if isinstance(shown, list):
        return isinstance(answer, list) and all(
            any(_fits(each, other) for other in answer) for each in shown
        )
    if isinstance(shown, str):
        return isinstance(answer, str)
    return isinstance(answer, int | float)
