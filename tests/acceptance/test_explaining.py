"""Scores over HTTP: their parts and contributions add up, and leaving one out is deleting it."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from models.text import StaticEncoder
from models.trained import Trained
from service.layout import MODELS_FOLDER
from service.registry import Registry
from tests.acceptance.server import Server
from tests.models.reference_model import ReferenceModel
from tests.tiny import AT, GENRES, NOON, events, item_id

TARGETS = [item_id(0, 4), item_id(0, 12), item_id(1, 3), item_id(3, 7)]
HOWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"hard": True},
    {"exclude_self": True},
    {"visible": {"types": ["view", "profile"]}},
]


def when(seconds: int) -> str:
    """A time so long before noon."""
    minute, second = divmod(3_600 * 11 + 59 * 60 + 59 - seconds, 60)
    hour, minute = divmod(minute, 60)
    return f"2026-01-01T{hour:02}:{minute:02}:{second:02}Z"


def history(user: str) -> list[dict[str, Any]]:
    """Events of every kind: repeated items, weights, types, vectors of their own, equal times."""
    random = np.random.default_rng(3)
    made = []
    for number in range(14):
        event = {
            "user_id": user,
            "event_id": f"{user}-{number}",
            "item_id": item_id(number % 3, number // 2),
            "type": "buy" if number % 5 == 4 else "view",
            "weight": (1.0, 0.25, 3.0)[number % 3],
            "timestamp": when(700 * (14 - number - number % 2)),
        }
        if number in (5, 9):
            event["key"] = np.round(random.normal(size=256), 3).tolist()
        if number in (5, 11):
            event["value"] = np.round(random.normal(size=256), 3).tolist()
        made.append(event)
    # Of an item that the catalogue does not have: it is in the history and is not attended.
    made.append({"user_id": user, "event_id": f"{user}-x", "item_id": "unknown", "timestamp": AT})
    return made


def post(http: httpx.Client, sent: list[dict[str, Any]]) -> None:
    """Store events, all of them new or all as they were."""
    answer = http.post("/v1/events", json={"events": sent})
    assert answer.status_code == 200, answer.text


def score(http: httpx.Client, user: str, **how: Any) -> list[dict[str, Any]]:
    """The scored targets with all their reasons, as of noon."""
    body = {"user_id": user, "item_ids": TARGETS, "explain": 50, "at": AT} | how
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    assert [item["item_id"] for item in items] == body["item_ids"]
    return items


@pytest.fixture
def user(http: httpx.Client) -> str:
    """A user with events of every kind and a profile."""
    post(http, history("explained"))
    interests = [GENRES[2], item_id(1, 9)]
    http.put("/v1/users/explained", json={"interests": interests}).raise_for_status()
    return "explained"


@pytest.mark.parametrize("how", HOWS)
def test_parts_and_contributions_add_up(http: httpx.Client, user: str, how: dict[str, Any]) -> None:
    """Sequence + Σ contributions + prior is the score, and so are the named parts."""
    for item in score(http, user, **how):
        parts, reasons = item["parts"], item["explanation"]
        assert sum(parts.values()) == pytest.approx(item["score"], abs=1e-4)
        told = sum(reason["contribution"] for reason in reasons)
        assert parts["sequence"] + told + parts["prior"] == pytest.approx(item["score"], abs=1e-4)
        sizes = [abs(reason["contribution"]) for reason in reasons]
        assert sizes == sorted(sizes, reverse=True)
        assert "unknown" not in {reason["item_id"] for reason in reasons}


@pytest.mark.parametrize("how", [{}, {"temperature": 0.3}, {"hard": True}])
def test_without_is_the_score_after_deleting_the_event(
    http: httpx.Client, user: str, how: dict[str, Any]
) -> None:
    """For each event: what the attention part was said to become is what it becomes."""
    compared = 0
    for event in history(user):
        event_id = event["event_id"]
        before = score(http, user, **how)
        http.delete(f"/v1/users/{user}/history/{event_id}").raise_for_status()
        after = score(http, user, **how)
        post(http, [event])
        for old, new in zip(before, after, strict=True):
            assert event_id not in {reason["event_id"] for reason in new["explanation"]}
            change = new["parts"]["attention"] - old["parts"]["attention"]
            told = [r["without"] for r in old["explanation"] if r["event_id"] == event_id]
            for without in told:  # none where it had no weight
                assert without - old["score"] == pytest.approx(change, abs=1e-4), event_id
                compared += 1
    assert 0 < compared <= 14 * len(TARGETS) if how.get("hard") else compared == 14 * len(TARGETS)


def test_without_of_an_interest_is_the_score_after_withdrawing_it(
    http: httpx.Client, user: str
) -> None:
    """Interests are rows beside the events, and are left out as events are."""
    before = score(http, user)
    http.put(f"/v1/users/{user}", json={"interests": [item_id(1, 9)]}).raise_for_status()
    after = score(http, user)
    for old, new in zip(before, after, strict=True):
        (reason,) = [r for r in old["explanation"] if r["title"] == GENRES[2]]
        assert (reason["event_id"], reason["item_id"], reason["type"]) == (None, None, "profile")
        change = new["parts"]["attention"] - old["parts"]["attention"]
        assert reason["without"] - old["score"] == pytest.approx(change, abs=1e-4)


def test_the_last_event_that_goes_leaves_the_prior(http: httpx.Client) -> None:
    """Without the only event there is nothing to attend to."""
    post(http, [{"user_id": "once", "event_id": "once", "item_id": TARGETS[0]}])
    before = score(http, "once")
    http.delete("/v1/users/once/history/once").raise_for_status()
    for old, new in zip(before, score(http, "once"), strict=True):
        (reason,) = old["explanation"]
        assert reason["weight"] == pytest.approx(1)
        assert reason["without"] == pytest.approx(old["score"] - old["parts"]["attention"])
        assert new["score"] == new["parts"]["prior"] == old["parts"]["prior"]
        assert (new["reason"], new["explanation"]) == ("popular", [])


def test_scores_equal_a_float64_loop_over_the_published_weights(trained: Server) -> None:
    """All parts of the scores of several users, from nothing but the model's files and events."""
    registry = Registry(trained.data / MODELS_FOLDER)
    with trained.client() as http:
        version = http.post("/v1/score", json={"item_ids": TARGETS}).json()["model_version"]
        catalogue = {
            item["item_id"]: item
            for item in http.get("/v1/items", params={"limit": 1000}).json()["items"]
        }
        scored = {user: score(http, user) for user in ("u0", "u5", "u11")}
    model = Trained.unpack(registry.load(version)[1])
    reference = ReferenceModel(model.model, model.model.config.heads)
    encoder = StaticEncoder()

    def vector(name: str) -> Any:
        item = catalogue[name]
        texts = [item["title"], item["description"], *item["tags"], ", ".join(item["categories"])]
        fields = encoder.encode(texts).astype(np.float16).astype(np.float64)
        content = fields.sum(0) / np.linalg.norm(fields.sum(0))
        return reference.vector(model.item_ids.index(name), content)

    for user, items in scored.items():
        past = [event for event in events() if event.user_id == user]
        vectors = [vector(event.item_id) for event in past]
        times = [event.timestamp or 0 for event in past]
        summary = reference.summary(vectors, times)
        for item in items:
            target = vector(item["item_id"])
            weights, gains = reference.attention(
                target,
                vectors,
                vectors,
                distances=list(range(len(past)))[::-1],
                ages=[NOON - time for time in times],
                weights=[1.0] * len(past),
            )
            row = model.item_ids.index(item["item_id"])
            parts = {
                "sequence": summary @ target,
                "attention": (weights * gains).sum(),
                "prior": reference.state["prior"][row],
            }
            assert item["parts"] == pytest.approx(parts, abs=1e-4)
            told = {reason["event_id"]: reason for reason in item["explanation"]}
            for j, event in enumerate(past):
                reason = told[event.event_id]
                assert reason["weight"] == pytest.approx(weights[:, j].mean(), abs=1e-4)
                each = (weights * gains)[:, j].sum()
                assert reason["contribution"] == pytest.approx(each, abs=1e-4)


def test_age_is_measured_from_the_request(trained: Server) -> None:
    """The same history asked about years later attends otherwise; the sequence part stays."""
    with trained.client() as http:
        post(http, history("aged"))
        now, later = (score(http, "aged", at=at)[0]["parts"] for at in (AT, "2031-01-01T12:00:00Z"))
    assert now["sequence"] == pytest.approx(later["sequence"], abs=1e-6)
    assert abs(now["attention"] - later["attention"]) > 1e-4
