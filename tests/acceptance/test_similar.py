"""Similar items over HTTP: by content, by training, or by both spaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import tiny
from tests.support.server import Server
from tests.support.tiny import item_id


@pytest.fixture
def http(trained: Server) -> Iterator[httpx.Client]:
    """A client of the server that has a model."""
    with trained.client() as client:
        yield client


def near(http: httpx.Client, name: str, **asked: Any) -> dict[str, Any]:
    """Return the items similar to an item, with cosines and shares."""
    answer = http.get(f"/v1/items/{name}/similar", params={"limit": 1000} | asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_similar_items_report_cosine_and_share_per_space(http: httpx.Client) -> None:
    seed = item_id(0, 1)
    events = Counter(event.item_id for event in tiny.events())  # of the training
    both = near(http, seed)
    alone = {space: near(http, seed, space=space) for space in ("content", "trained")}
    assert both["spaces"] == ["content", "trained"]
    assert sum(item["weight"] for item in both["items"]) == pytest.approx(1, abs=1e-5)
    for space, answer in alone.items():
        assert answer["spaces"] == [space]
        by_id = {item["item_id"]: item for item in answer["items"]}
        # In one space, the score only scales the cosine: the order is that of cosines.
        order = [item["spaces"][space]["cosine"] for item in answer["items"]]
        assert order == sorted(order, reverse=True)
        for item in both["items"]:
            assert set(item["spaces"]) == {"content", "trained"}
            assert sum(one["share"] for one in item["spaces"].values()) == pytest.approx(1)
            own = by_id[item["item_id"]]
            assert own["spaces"] == {space: {"cosine": item["spaces"][space]["cosine"], "share": 1}}
    scores = {space: {i["item_id"]: i["score"] for i in a["items"]} for space, a in alone.items()}
    texts, trainings, told = [], [], []
    for item in both["items"]:
        by_text, by_training = (scores[space][item["item_id"]] for space in scores)
        known = [events[name] / (events[name] + 20) for name in (seed, item["item_id"])]
        texts.append(by_text)
        trainings.append(by_training * np.sqrt(np.prod(known)))
        told.append(item["score"])
    # What content tells of this catalogue is one factor, at most 1: the first item gives it.
    factor = np.log(np.exp(told[0]) - np.exp(trainings[0])) / texts[0]
    assert 0 < factor <= 1
    expected = np.logaddexp(factor * np.array(texts), trainings)
    assert told == pytest.approx(expected.tolist(), abs=1e-4)


def put(http: httpx.Client, item: dict[str, Any]) -> None:
    """Store one item."""
    http.post("/v1/items", json={"items": [item]}).raise_for_status()


def ids(answer: dict[str, Any]) -> list[str]:
    """The items of an answer, in its order."""
    return [item["item_id"] for item in answer["items"]]


def test_untrained_item_is_similar_by_content_alone(http: httpx.Client) -> None:
    """An untrained item has only the content space; `space=trained` is refused with 422."""
    seed = item_id(0, 1)
    put(http, {"item_id": "fresh", "title": "supernova nebula quasar", "tags": ["telescope"]})
    assert near(http, "fresh")["spaces"] == ["content"]
    (met,) = [item for item in near(http, seed)["items"] if item["item_id"] == "fresh"]
    assert set(met["spaces"]) == {"content"}
    assert "fresh" not in ids(near(http, seed, space="trained"))
    refused = http.get("/v1/items/fresh/similar", params={"space": "trained"})
    assert refused.status_code == 422
    assert [(e["in"], e["pointer"]) for e in refused.json()["errors"]] == [("query", "/space")]
    assert "was not in the training" in refused.json()["errors"][0]["detail"]
    assert http.delete("/v1/items/fresh").status_code == 204


def test_an_item_without_text_is_similar_by_training_alone(http: httpx.Client) -> None:
    seed = item_id(0, 1)
    before = http.get(f"/v1/items/{seed}").json()
    try:
        put(http, {"item_id": seed})
        assert near(http, seed)["spaces"] == ["trained"]
        assert http.get(f"/v1/items/{seed}/similar", params={"space": "content"}).status_code == 422
    finally:
        put(http, before)
    assert near(http, seed)["spaces"] == ["content", "trained"]


def test_before_training_items_are_similar_by_their_text(untrained: Server) -> None:
    """Without a model, similar items have only the content space."""
    with untrained.client() as http:
        found = near(http, item_id(0, 1))
        assert found["spaces"] == ["content"]
        assert {space for item in found["items"] for space in item["spaces"]} == {"content"}
