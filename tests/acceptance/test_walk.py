"""A new user's walk, by docs/start.md only, over the exports of an invented wholesaler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import httpx
import pytest

from tests.acceptance.walk import OF_PAGES, OF_STORE, Pages, as_shown
from tests.support.shop_sales import invented
from tests.support.walk import Walk


class Walked(NamedTuple):
    """A walk that was gone to its end, and the service at its end."""

    walk: Walk
    http: httpx.Client
    pages: Pages


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """A walk until the exports are stored."""
    training = ("--epochs", "4", "--processes", "1")
    walk = Walk(invented(), tmp_path_factory.mktemp("shop"), training)
    walk.store()
    return walk


@pytest.fixture(scope="module")
def walked(stored: Walk) -> Iterator[Walked]:
    """The service with a trained model."""
    stored.train()
    with stored.serve() as http:
        yield Walked(stored, http, stored.pages(http))


@pytest.mark.parametrize("expectation", OF_STORE, ids=lambda each: each.__name__)
def test_the_exports_are_stored(stored: Walk, expectation: Callable[[Walk], None]) -> None:
    """The exports are stored as they are meant, once; see each expectation of the walk."""
    expectation(stored)


def test_the_page_shows_the_answer(walked: Walked) -> None:
    as_shown(walked.walk, walked.walk.ask(walked.http))


@pytest.mark.parametrize("expectation", OF_PAGES, ids=lambda each: each.__name__)
def test_the_home_pages_keep_to_the_request(
    walked: Walked, expectation: Callable[[Walk, Pages], None]
) -> None:
    """The rows keep to price, quota, boost and reasons; see each expectation of the walk."""
    expectation(walked.walk, walked.pages)


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
