"""Explanations of scores over HTTP: contributions and the prior sum to the score."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from models.recommender.artifact import TrainedModel
from models.text.encoders import StaticEncoder
from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.registry import Registry
from tests.support import reference_model
from tests.support.reference_model import ReferenceModel
from tests.support.server import Server
from tests.support.tiny import AT, GENRES, NOON, events, item_id

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


class Published:
    """Scores computed in float64 loops from the files of a server's published model."""

    def __init__(self, server: Server, http: httpx.Client) -> None:
        registry = Registry(server.data / MODELS_FOLDER)
        version = http.post("/v1/score", json={"item_ids": TARGETS}).json()["model_version"]
        self.trained = TrainedModel.from_files(registry.load(version))
        model = self.trained.model
        self.reference = ReferenceModel(model, model.config.heads, model.config.window)
        listed = http.get("/v1/items", params={"limit": 1000}).json()["items"]
        self.catalogue = {item["item_id"]: item for item in listed}
        self._encoder = StaticEncoder()

    def row(self, name: str) -> int:
        return self.trained.item_ids.index(name) if name in self.trained.item_ids else -1

    def vector(self, name: str) -> Any:
        item = self.catalogue[name]
        texts = [item["title"], item["description"], *item["tags"], ", ".join(item["categories"])]
        fields = self._encoder.encode(texts).astype(np.float16).astype(np.float64)
        content = fields.sum(0) / np.linalg.norm(fields.sum(0))
        return self.reference.vector(self.row(name), content)

    def encode(self, names: list[str], times: list[int]) -> Any:
        """The states of events and the user state at noon."""
        return self.reference.encode([self.vector(name) for name in names], times, NOON)

    def similarity(self, names: list[str], target: str) -> float:
        """The similarity part of the target, in which each item counts once."""
        row = self.row(target)
        return sum(self.reference.similarity(self.row(name), row) for name in set(names))

    def attention(
        self, names: list[str], times: list[int], target: str, user_state: Any, states: Any
    ) -> Any:
        """Weights and gains [H, n] of the attention part at noon."""
        vectors = [self.vector(name) for name in names]
        return self.reference.attention(
            self.vector(target),
            vectors,
            vectors,
            user=user_state,
            states=states,
            distances=list(range(len(names)))[::-1],
            ages=[NOON - time for time in times],
            weights=[1.0] * len(names),
        )

    def transitions(self, user_state: Any, names: list[str], target: str) -> float:
        recent = [self.row(name) for name in names[::-1]]
        return self.reference.transitions(user_state, recent, self.row(target))


@pytest.mark.parametrize("how", HOWS)
def test_parts_and_contributions_add_up(http: httpx.Client, user: str, how: dict[str, Any]) -> None:
    """Parts sum to the score, and so do contributions and prior."""
    for item in score(http, user, **how):
        parts, reasons = item["parts"], item["explanation"]
        assert sum(parts.values()) == pytest.approx(item["score"], abs=1e-4)
        told = sum(reason["contribution"] for reason in reasons)
        assert told + parts["prior"] == pytest.approx(item["score"], abs=1e-4)
        contributions = [reason["contribution"] for reason in reasons]
        assert contributions == sorted(contributions, reverse=True)
        assert "unknown" not in {reason["item_id"] for reason in reasons}


def test_score_without_the_only_event_is_the_prior(http: httpx.Client) -> None:
    """Deleting the only event leaves the prior: its effect is all the rest."""
    post(http, [{"user_id": "once", "event_id": "once", "item_id": TARGETS[0], "timestamp": AT}])
    before = score(http, "once")
    http.delete("/v1/users/once/history/once").raise_for_status()
    for old, new in zip(before, score(http, "once"), strict=True):
        (reason,) = old["explanation"]
        assert reason["weight"] == pytest.approx(1)
        gone = sum(old["parts"].values()) - old["parts"]["prior"]
        assert reason["effect"] == pytest.approx(gone, abs=1e-5)
        assert new["score"] == new["parts"]["prior"] == old["parts"]["prior"]
        assert (new["reason"], new["explanation"]) == ("popular", [])


def test_scores_equal_a_float64_loop_over_the_published_weights(trained: Server) -> None:
    """All parts of the scores of several users, from nothing but the model's files and events."""
    with trained.client() as http:
        published = Published(trained, http)
        scored = {user: score(http, user) for user in ("u0", "u5", "u11")}
    followed = 0
    for user, items in scored.items():
        past = [event for event in events() if event.user_id == user]
        names, times = [e.item_id for e in past], [e.timestamp or 0 for e in past]
        states, user_state = published.encode(names, times)
        for item in items:
            target = item["item_id"]
            weights, gains = published.attention(names, times, target, user_state, states)
            parts = {
                "transitions": published.transitions(user_state, names, target),
                "attention": (weights * gains).sum(),
                "prior": published.reference.state["prior"][published.row(target)],
            }
            if "similarity" in item["parts"]:
                parts["similarity"] = published.similarity(names, target)
            assert item["parts"] == pytest.approx(parts, abs=1e-4)
            followed += parts["transitions"] != 0
            counted = parts["transitions"] + published.similarity(names, target)
            lost = []
            for j in range(len(names)):
                left = names[:j] + names[j + 1 :]
                less = published.transitions(user_state, left, target)
                lost.append(counted - less - published.similarity(left, target))
            newest = {}
            for j in range(max(0, len(names) - 8), len(names)):
                left, left_times = names[:j] + names[j + 1 :], times[:j] + times[j + 1 :]
                left_states, left_state = published.encode(left, left_times)
                left_weights, left_gains = published.attention(
                    left, left_times, target, left_state, left_states
                )
                newest[j] = (
                    (left_weights * left_gains).sum()
                    + published.transitions(left_state, left, target)
                    + published.similarity(left, target)
                )
            each, _ = reference_model.contributions(weights, gains, np.array(lost), counted, newest)
            told = {reason["event_id"]: reason for reason in item["explanation"]}
            for j, event in enumerate(past):
                reason = told[event.event_id]
                assert reason["weight"] == pytest.approx(weights[:, j].mean(), abs=1e-4)
                assert reason["contribution"] == pytest.approx(each[j], abs=1e-4)
    assert followed > 3


def test_age_is_measured_from_the_request(trained: Server) -> None:
    """A later request time changes the attention part of the same history."""
    with trained.client() as http:
        post(http, history("aged"))
        now, later = (score(http, "aged", at=at)[0]["parts"] for at in (AT, "2026-01-01T15:00:00Z"))
    assert abs(now["attention"] - later["attention"]) > 1e-4


def test_transitions_are_constant_beyond_the_horizon(trained: Server) -> None:
    """Beyond the horizon the user state does not depend on the request time."""
    with trained.client() as http:
        post(http, history("gone"))
        years, decades = (score(http, "gone", at=at)[0]["parts"]
                          for at in ("2031-01-01T12:00:00Z", "2061-01-01T12:00:00Z"))  # fmt: skip
    assert years["transitions"] == pytest.approx(decades["transitions"], abs=1e-6)
