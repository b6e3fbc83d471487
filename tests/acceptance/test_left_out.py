"""Effects over HTTP: with `explain_exact` the score falls by them when the event is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from tests.acceptance.test_explaining import HOWS, history, post
from tests.support.server import Server
from tests.support.tiny import AT, GENRES, item_id

TARGETS = [item_id(0, 4), item_id(3, 7)]
EVERY = [item_id(genre, number) for genre in range(4) for number in range(6)]


def ask(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The items of an answer as of noon."""
    answer = http.post(path, json={"at": AT} | body)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def score(http: httpx.Client, user: str, **how: Any) -> list[dict[str, Any]]:
    """The scored targets with fifty exact reasons each."""
    asked = {"user_id": user, "item_ids": TARGETS, "explain": 50, "explain_exact": True}
    return ask(http, "/v1/score", **asked | how)


def personal(item: dict[str, Any]) -> float:
    """Return a score without its prior, which depends on the events of all users."""
    return float(item["score"] - item["parts"]["prior"])


def exact_effect(reason: dict[str, Any]) -> float:
    """Return the effect of a reason, which must be exact."""
    assert reason["effect_is_exact"] is True
    return float(reason["effect"])


def store(http: httpx.Client, events: list[dict[str, Any]], interests: Sequence[str] = ()) -> None:
    """Store a user's events anew: those of one time are read in the order of their arrival."""
    user = f"/v1/users/{events[0]['user_id']}"
    http.delete(user).raise_for_status()
    post(http, events)
    if interests:
        http.put(user, json={"interests": interests}).raise_for_status()


def compare(
    http: httpx.Client, before: list[dict[str, Any]], gone: list[dict[str, Any]], **how: Any
) -> list[tuple[float, float]]:
    """Pair each target's score less the effect of some events with its score after their deletion.

    `before` are the targets as they were scored with all events of the user. The deleted ones are
    all events on one item, of one type.
    """
    user = gone[0]["user_id"]
    for event in gone:
        path = f"/v1/users/{user}/history/{event['event_id']}"
        http.delete(path).raise_for_status()
    # Without reasons, of which each costs the service two more scores.
    after = score(http, user, **how, explain=0, explain_exact=False)
    return [
        (personal(old) - exact_effect(reason), personal(new))
        for old, new in zip(before, after, strict=True)
        for reason in old["explanation"]
        if (reason["item_id"], reason["type"]) == name_of(gone[0]) and reason["events"] == len(gone)
    ]


def name_of(event: dict[str, Any]) -> tuple[str, str]:
    """The item and the type of an event."""
    return event["item_id"], event.get("type", "view")


def by_item(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events on each item, of each type."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        groups.setdefault(name_of(event), []).append(event)
    return [*groups.values()]


def long_history(user: str, length: int, begins: int) -> list[dict[str, Any]]:
    """Events of which many share a second; every tenth is heavy, so that old ones count too.

    Those before the place `begins` are of a type of their own.
    """
    random = np.random.default_rng(length)
    return [
        {
            "user_id": user,
            "event_id": f"{user}-{number}",
            "item_id": item_id(int(random.integers(4)), int(random.integers(15))),
            "type": "early" if number < begins else "view",
            "weight": 40.0 if number % 10 == 0 else 1.0,
            "timestamp": f"2025-12-{1 + number // 20:02}T08:{(number % 20) // 3:02}:00Z",
        }
        for number in range(length)
    ]


@pytest.mark.parametrize("how", HOWS)
def test_the_score_falls_by_the_effect_of_a_deleted_event(
    http: httpx.Client, how: dict[str, Any]
) -> None:
    """The effect of the events on an item is what the score loses by their deletion, to 1e-4."""
    user, compared, interests = "left", 0, [GENRES[2]]
    events = history(user)
    events += [{**events[at], "event_id": f"again-{at}", "timestamp": AT} for at in (3, 6, 7)]
    store(http, events, interests)
    groups, before = by_item(events), score(http, user, **how)
    assert len(groups) == len(events) - 3
    for gone in groups:
        for told, real in compare(http, before, gone, **how):
            assert told == pytest.approx(real, abs=1e-4), name_of(gone[0])
            compared += 1
        store(http, events, interests)
    assert compared >= (2 if how.get("hard") else 2 * 11)


# Of 251 events the encoder reads 151, and of the 250 that are left 200: its window begins
# elsewhere. Of 230 and of 229 it reads from the same place on.
@pytest.mark.parametrize(("length", "begins"), [(230, 50), (251, 100)])
def test_effects_hold_before_and_within_the_window(
    http: httpx.Client, length: int, begins: int
) -> None:
    user = f"long-{length}"
    events = long_history(user, length, begins)
    store(http, events)
    whole = score(http, user)
    named = {(r["item_id"], r["type"], r["events"]) for item in whole for r in item["explanation"]}
    chosen = [group for group in by_item(events) if (*name_of(group[0]), len(group)) in named]
    within = [group for group in chosen if events.index(group[0]) >= begins]
    before = [group for group in chosen if events.index(group[0]) < begins]
    assert any(len(group) > 1 for group in within[:4])
    for part in (before, within):
        compared = []
        for group in part[:4]:
            compared += compare(http, whole, group)
            store(http, events)
        assert len(compared) >= 4
        for told, real in compared:
            assert told == pytest.approx(real, abs=1e-4)


def test_the_score_falls_by_the_effect_of_a_withdrawn_interest(http: httpx.Client) -> None:
    post(http, history("fond"))
    http.put("/v1/users/fond", json={"interests": [GENRES[2], item_id(1, 9)]}).raise_for_status()
    before = score(http, "fond")
    http.put("/v1/users/fond", json={"interests": [item_id(1, 9)]}).raise_for_status()
    for old, new in zip(before, score(http, "fond"), strict=True):
        (reason,) = [r for r in old["explanation"] if r["title"] == GENRES[2]]
        assert personal(old) - exact_effect(reason) == pytest.approx(personal(new), abs=1e-4)


def test_the_score_falls_by_the_effect_of_an_inline_event(http: httpx.Client) -> None:
    session = [{"item_id": item_id(g, 2), "timestamp": f"2026-01-01T11:0{g}:00Z"} for g in range(4)]
    asked: dict[str, Any] = {"item_ids": TARGETS, "explain": 50, "explain_exact": True}
    whole = ask(http, "/v1/score", history=session, **asked)
    for number, event in enumerate(session):
        rest = [other for at, other in enumerate(session) if at != number]
        for old, new in zip(whole, ask(http, "/v1/score", history=rest, **asked), strict=True):
            (told,) = [r for r in old["explanation"] if r["item_id"] == event["item_id"]]
            assert personal(old) - exact_effect(told) == pytest.approx(personal(new), abs=1e-4)


def test_recommend_and_search_report_the_effects_of_score(http: httpx.Client) -> None:
    post(http, history("found"))
    how: dict[str, Any] = {"user_id": "found", "explain": 8, "explain_exact": True}
    for path, asked in (
        ("/v1/recommend", {"exclude_seen": False}),
        ("/v1/search", {"query": "rocket garlic castle"}),
    ):
        items = ask(http, path, limit=12, **asked, **how)
        ids = [item["item_id"] for item in items]
        scored = ask(http, "/v1/score", item_ids=ids, **how)
        assert len(items) == 12
        for item, same in zip(items, scored, strict=True):
            told = {r["event_id"]: exact_effect(r) for r in item["explanation"]}
            again = {r["event_id"]: exact_effect(r) for r in same["explanation"]}
            assert len(told) == 8
            assert told == pytest.approx(again, abs=1e-4)


def test_effects_are_computed_where_they_are_requested(http: httpx.Client) -> None:
    """/v1/score estimates effects by default, a list does when asked; nothing else changes."""
    post(http, history("plain"))
    fields = ("effect", "effect_is_exact")

    def without_effects(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for item in items:
            for reason in item["explanation"]:
                assert [reason.pop(field, None) is not None for field in fields] == [True, True]
        return without_prior(items)

    def without_prior(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The popularity of items is counted anew between any two questions.
        for item in items:
            assert item.pop("score") == pytest.approx(sum(item["parts"].values()), abs=1e-6)
            del item["parts"]["prior"]
        return items

    exact, estimated = score(http, "plain"), score(http, "plain", explain_exact=False)
    plain = without_prior(score(http, "plain", explain_exact=False, explain_effects=False))
    assert without_effects(exact) == without_effects(estimated) == plain
    assert not any(field in reason for item in plain for reason in item["explanation"]
                   for field in fields)  # fmt: skip
    how: dict[str, Any] = {"user_id": "plain", "explain": 3}
    listed = without_prior(ask(http, "/v1/recommend", **how))
    assert without_effects(ask(http, "/v1/recommend", explain_effects=True, **how)) == listed
    for item in score(http, "plain", explain=0):
        assert "explanation" not in item
    many: dict[str, Any] = {"user_id": "plain", "explain": 1, "item_ids": EVERY}
    assert len(EVERY) > 20
    assert not any(field in reason for item in ask(http, "/v1/score", **many)
                   for reason in item["explanation"] for field in fields)  # fmt: skip


def test_estimates_are_near_the_exact_effects(trained: Server) -> None:
    """Estimated effects follow the exact ones, and those of the newest eight events are exact.

    All are exact while the encoder reads no more than sixty-four events.
    """
    with trained.client() as http:
        post(http, long_history("few", 24, 0))
        many = long_history("many", 80, 0)
        taken = {event["item_id"] for event in many[:-8]}
        others = (item_id(genre, number) for genre in range(4) for number in range(15))
        once = [item for item in others if item not in taken]
        for event, item in zip(many[-8:], once[:8], strict=True):
            event["item_id"] = item  # alone on its item, so that its effect is a reason's own
        post(http, many)
        few, (exact, estimated) = (
            score(http, "few", explain_exact=False),
            [score(http, "many", explain_exact=is_exact) for is_exact in (True, False)],
        )
    assert all(reason["effect_is_exact"] for item in few for reason in item["explanation"])
    effects: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for one, other in zip(estimated, exact, strict=True):
        for mine, yours in zip(one["explanation"], other["explanation"], strict=True):
            if mine["events"] > 1:
                continue
            assert mine["effect_is_exact"] == (int(mine["event_id"].split("-")[1]) >= 80 - 8)
            effects[mine["effect_is_exact"]].append((mine["effect"], yours["effect"]))
    assert len(effects[True]) > 4 * len(TARGETS)
    assert all(mine == pytest.approx(yours, abs=1e-4) for mine, yours in effects[True])
    guessed = np.array(effects[False])
    assert len(guessed) > 8 * len(TARGETS)
    assert np.abs(guessed[:, 0] - guessed[:, 1]).mean() < 0.5 * np.abs(guessed[:, 1]).mean()
