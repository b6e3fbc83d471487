"""`explain_exact` over HTTP: `without_exact` equals the score after deletion of the event."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from tests.acceptance.test_explaining import HOWS, history, post
from tests.support.server import Server
from tests.support.tiny import AT, GENRES, item_id

TARGETS = [item_id(0, 4), item_id(3, 7)]


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


def compare(
    http: httpx.Client, user: str, event: dict[str, Any], **how: Any
) -> list[tuple[float, float]]:
    """Pair each target's `without_exact` of an event with its score after deletion of the event.

    The event is stored again afterwards.
    """
    event_id = event["event_id"]
    before = score(http, user, **how)
    http.delete(f"/v1/users/{user}/history/{event_id}").raise_for_status()
    after = score(http, user, **how)
    post(http, [event])
    return [
        (reason["without_exact"] - old["parts"]["prior"], personal(new))
        for old, new in zip(before, after, strict=True)
        for reason in old["explanation"]
        if reason["event_id"] == event_id
    ]


def long_history(user: str, length: int) -> list[dict[str, Any]]:
    """Events of which many share a second; every tenth is heavy, so that old ones count too."""
    random = np.random.default_rng(length)
    return [
        {
            "user_id": user,
            "event_id": f"{user}-{number}",
            "item_id": item_id(int(random.integers(4)), int(random.integers(15))),
            "weight": 40.0 if number % 10 == 0 else 1.0,
            "timestamp": f"2025-12-{1 + number // 20:02}T08:{(number % 20) // 3:02}:00Z",
        }
        for number in range(length)
    ]


@pytest.mark.parametrize("how", HOWS)
def test_without_exact_is_the_score_after_deleting_the_event(
    http: httpx.Client, how: dict[str, Any]
) -> None:
    """`without_exact` of an event equals the score after its deletion, to 1e-4."""
    user, compared = "left", 0
    post(http, history(user))
    http.put(f"/v1/users/{user}", json={"interests": [GENRES[2]]}).raise_for_status()
    for event in history(user):
        for told, real in compare(http, user, event, **how):
            assert told == pytest.approx(real, abs=1e-4), event["event_id"]
            compared += 1
    assert compared >= (2 if how.get("hard") else 2 * 11)


# Of 251 events the encoder reads 151, and of the 250 that are left 200: its window begins
# elsewhere. Of 230 and of 229 it reads from the same place on.
@pytest.mark.parametrize(("length", "begins"), [(230, 50), (251, 100)])
def test_without_exact_holds_before_and_within_the_window(
    http: httpx.Client, length: int, begins: int
) -> None:
    """`without_exact` is correct for events before and within the encoder's window."""
    user = f"long-{length}"
    events = long_history(user, length)
    post(http, events)
    named = {r["event_id"] for item in score(http, user) for r in item["explanation"]}
    chosen = [event for event in events if event["event_id"] in named]
    within = [event for event in chosen if events.index(event) >= begins]
    before = [event for event in chosen if events.index(event) < begins]
    for part in (before, within):
        compared = [pair for event in part[:4] for pair in compare(http, user, event)]
        assert len(compared) >= 4
        for told, real in compared:
            assert told == pytest.approx(real, abs=1e-4)


def test_without_exact_of_an_interest_is_the_score_after_withdrawing_it(http: httpx.Client) -> None:
    """`without_exact` of a profile interest equals the score after it is withdrawn."""
    post(http, history("fond"))
    http.put("/v1/users/fond", json={"interests": [GENRES[2], item_id(1, 9)]}).raise_for_status()
    before = score(http, "fond")
    http.put("/v1/users/fond", json={"interests": [item_id(1, 9)]}).raise_for_status()
    for old, new in zip(before, score(http, "fond"), strict=True):
        (reason,) = [r for r in old["explanation"] if r["title"] == GENRES[2]]
        told = reason["without_exact"] - old["parts"]["prior"]
        assert told == pytest.approx(personal(new), abs=1e-4)


def test_without_exact_of_an_inline_event_is_the_score_without_it(http: httpx.Client) -> None:
    """`without_exact` of an inline event equals the score of a request without the event."""
    session = [{"item_id": item_id(g, 2), "timestamp": f"2026-01-01T11:0{g}:00Z"} for g in range(4)]
    asked: dict[str, Any] = {"item_ids": TARGETS, "explain": 50, "explain_exact": True}
    whole = ask(http, "/v1/score", history=session, **asked)
    for number, event in enumerate(session):
        rest = [other for at, other in enumerate(session) if at != number]
        for old, new in zip(whole, ask(http, "/v1/score", history=rest, **asked), strict=True):
            (told,) = [r for r in old["explanation"] if r["item_id"] == event["item_id"]]
            assert told["without_exact"] - old["parts"]["prior"] == pytest.approx(
                personal(new), abs=1e-4
            )


def test_recommend_and_search_report_the_without_exact_of_score(http: httpx.Client) -> None:
    """Recommend and search report the same `without_exact` as /v1/score."""
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
            told = {r["event_id"]: r["without_exact"] for r in item["explanation"]}
            again = {r["event_id"]: r["without_exact"] for r in same["explanation"]}
            assert len(told) == 8
            assert told == pytest.approx(again, abs=1e-4)


def test_explain_exact_only_adds_its_field(http: httpx.Client) -> None:
    """`explain_exact` adds `without_exact` to each reason and changes no other value."""
    post(http, history("plain"))
    exact, plain = score(http, "plain"), score(http, "plain", explain_exact=False)
    for one, other in zip(exact, plain, strict=True):
        assert all("without_exact" not in reason for reason in other["explanation"])
        assert [reason.pop("without_exact", None) is None for reason in one["explanation"]] == (
            [False] * len(other["explanation"])
        )
    assert exact == plain
    for item in score(http, "plain", explain=0):
        assert "explanation" not in item


def test_without_exact_differs_from_without_after_training(trained: Server) -> None:
    """After training `without_exact` differs from `without`, which keeps the sequence part."""
    with trained.client() as http:
        post(http, history("seen"))
        apart = [
            abs(reason["without_exact"] - reason["without"])
            for item in score(http, "seen")
            for reason in item["explanation"]
        ]
    assert max(apart) > 1e-3
