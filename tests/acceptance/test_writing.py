"""Read-your-writes: every answer after an acknowledgement reflects the acknowledged write."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.server import Server
from tests.support.tiny import AT, EACH, GENRES, item_id

USERS = 32
CLIENTS = 8
POSTS = 125  # of each client

Event = dict[str, Any]


def events(user: str, count: int, genre: int = 0, prefix: str = "") -> list[Event]:
    """So many events of a user, a minute apart, before noon."""
    return [
        {
            "user_id": user,
            "event_id": f"{prefix or user}-{n}",
            "item_id": item_id(genre, n),
            "timestamp": f"2026-01-01T11:{n:02}:00Z",
        }
        for n in range(count)
    ]


def store(http: httpx.Client, sent: list[Event]) -> tuple[int, int]:
    """Store events; return the numbers of stored events and of duplicates."""
    answer = http.post("/v1/events", json={"events": sent})
    assert answer.status_code == 200, answer.text
    return answer.json()["stored"], answer.json()["duplicates"]


def score(http: httpx.Client, user: str, at: str | None = AT) -> dict[str, Any]:
    """One target's score with all its reasons."""
    body = {"user_id": user, "item_ids": [item_id(0, 9)], "explain": 50, "at": at}
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    item: dict[str, Any] = answer.json()["items"][0]
    return item


def reasons(http: httpx.Client, user: str) -> list[str]:
    """Return the event ids in the explanation of a score of now."""
    return sorted(reason["event_id"] for reason in score(http, user, at=None)["explanation"])


def events_of_reasons(http: httpx.Client, user: str) -> int:
    """Count the events that the explanation of a score of now sums up."""
    return sum(reason["events"] for reason in score(http, user, at=None)["explanation"])


def history(http: httpx.Client, user: str) -> list[str]:
    """The events of a user, newest first, page by page."""
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = http.get(f"/v1/users/{user}/history", params={"limit": 10, **cursor}).json()
        found += [event["event_id"] for event in page["events"]]
        if page["cursor"] is None:
            return found
        cursor = {"cursor": page["cursor"]}


# ------------------------------------------------------------------ many at once


class Client:
    """Client that writes and deletes at random and checks an answer after each change."""

    def __init__(self, number: int, http: httpx.AsyncClient) -> None:
        self.number = number
        self.http = http
        self.random = np.random.default_rng(number)
        self.mine: dict[str, str] = {}  # event -> user
        self.gone: dict[str, str] = {}

    async def run(self) -> None:
        for number in range(POSTS):
            user, event_id = f"w{self.random.integers(USERS)}", f"c{self.number}-{number}"
            item = item_id(int(self.random.integers(len(GENRES))), int(self.random.integers(EACH)))
            # Of a type of its own, so that it is a reason apart from the other clients' events.
            kind = f"client-{self.number}"
            event = {"user_id": user, "item_id": item, "event_id": event_id, "type": kind}
            await self._ask("POST", "/v1/events", {"events": [event]})
            self.mine[event_id] = user
            assert await self._seen(user, event_id, item), f"{event_id} of {user} is not seen"
            if self.random.random() < 0.1:
                event_id = str(self.random.choice(list(self.mine)))
                user = self.mine.pop(event_id)
                await self._ask("DELETE", f"/v1/users/{user}/history/{event_id}")
                self.gone[event_id] = user
                assert not await self._seen(user, event_id), f"{event_id} of {user} is seen"

    async def _seen(self, user: str, event_id: str, item: str | None = None) -> bool:
        """Whether the next answer, of a kind drawn at random, knows of the event."""
        kind = self.random.integers(3 if item is None else 4)
        if kind == 0:
            asked = {"user_id": user, "item_ids": [item_id(1, 1)], "explain": 50}
            told = (await self._ask("POST", "/v1/score", asked))["items"][0]["explanation"]
            return event_id in {reason["event_id"] for reason in told}
        if kind == 1:
            query = {"memory": {"user_id": user}, "query": {"text": "moon"}, "limit": 1000}
            return event_id in (await self._ask("POST", "/v1/attend", query))["ids"]
        if kind == 2:
            page = await self._ask("GET", f"/v1/users/{user}/history?limit=1000")
            return event_id in {event["event_id"] for event in page["events"]}
        offers = await self._ask("POST", "/v1/recommend", {"user_id": user, "limit": 1000})
        return item not in {offer["item_id"] for offer in offers["items"]}

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.http.request(method, path, json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None


def test_each_of_a_thousand_writes_is_in_the_next_answer(trained: Server) -> None:
    """Each of 1,000 concurrent writes is reflected in the next answer, whatever its kind."""

    async def run() -> list[Client]:
        async with trained.connect() as http:
            clients = [Client(number, http) for number in range(CLIENTS)]
            await asyncio.gather(*(client.run() for client in clients))
            return clients

    clients = asyncio.run(run())
    with trained.client() as http:
        for user in (f"w{n}" for n in range(USERS)):
            stored = sorted(e for c in clients for e, owner in c.mine.items() if owner == user)
            assert sorted(history(http, user)) == stored
            assert {*reasons(http, user)} <= {*stored}
            assert events_of_reasons(http, user) == len(stored)
    assert sum(len(client.mine) + len(client.gone) for client in clients) == CLIENTS * POSTS


# ------------------------------------------------------------------ one by one


def test_sending_an_event_again_changes_nothing(http: httpx.Client) -> None:
    """The same id with the same body is a duplicate, within a batch and later."""
    sent = events("twice", 5)
    assert store(http, [*sent, sent[0]]) == (5, 1)
    before = score(http, "twice")
    assert store(http, sent) == (0, 5)
    without_time = [{k: v for k, v in event.items() if k != "timestamp"} for event in sent]
    assert store(http, without_time) == (0, 5)
    assert score(http, "twice") == before
    assert history(http, "twice") == [f"twice-{n}" for n in (4, 3, 2, 1, 0)]


@pytest.mark.parametrize(
    "other",
    [{"item_id": item_id(1, 1)}, {"weight": 2.0}, {"type": "buy"}, {"user_id": "somebody"}],
)
def test_another_event_of_the_same_id_is_a_conflict(
    http: httpx.Client, other: dict[str, Any]
) -> None:
    sent = events("conflict", 2)
    store(http, sent)
    before = score(http, "conflict")
    batch = [*events("conflict", 3)[2:], sent[0] | other]
    answer = http.post("/v1/events", json={"events": batch})
    assert answer.status_code == 409
    assert "conflict-0" in answer.json()["detail"]
    assert score(http, "conflict") == before
    assert history(http, "conflict") == ["conflict-1", "conflict-0"]
    assert history(http, "somebody") == []


def test_events_without_an_id_are_all_new(http: httpx.Client) -> None:
    """Equal events without ids are stored separately, each under a generated id."""
    sent = [{"user_id": "again", "item_id": item_id(0, 1)}] * 2
    assert store(http, sent) == (2, 0)
    assert store(http, sent) == (2, 0)
    assert len(set(history(http, "again"))) == 4
    assert len(reasons(http, "again")) == 1
    assert events_of_reasons(http, "again") == 4


def test_unknown_items_of_events_are_named(http: httpx.Client) -> None:
    """They are counted once each, and no longer once the catalogue has them."""
    sent = events("unknown-items", 1) + [
        {"user_id": "unknown-items", "item_id": name} for name in ("nowhere", "nowhere", "never")
    ]
    body = {"events": sent}
    answer = http.post("/v1/events", json=body).json()
    assert answer["stored"] == 4
    assert (answer["unknown_items"], answer["unknown_examples"]) == (2, ["nowhere", "never"])
    try:
        http.post("/v1/items", json={"items": [{"item_id": "nowhere"}]}).raise_for_status()
        answer = http.post("/v1/events", json=body).json()
        assert answer["unknown_examples"] == ["never"]
        assert "unknown_items" not in http.post("/v1/events", json={"events": sent[:1]}).json()
    finally:
        http.delete("/v1/items/nowhere")


def test_unknown_user_gets_popular_items(http: httpx.Client) -> None:
    answer = http.post("/v1/recommend", json={"user_id": "nobody", "limit": 5}).json()
    assert {item["reason"] for item in answer["items"]} == {"popular"}
    assert {item["parts"]["attention"] for item in answer["items"]} == {0.0}
    assert len(answer["items"]) == 5
    assert http.get("/v1/users/nobody").status_code == 404
    assert history(http, "nobody") == []


def test_deleted_user_is_absent_from_the_next_answer(http: httpx.Client) -> None:
    """Deletion removes a user's events and profile from the next answer and frees the event ids."""
    sent = events("leaver", 6)
    store(http, sent)
    http.put("/v1/users/leaver", json={"interests": ["music"]}).raise_for_status()
    assert len(score(http, "leaver")["explanation"]) == 7
    assert http.delete("/v1/users/leaver").json() == {"forgotten": 6}
    gone = score(http, "leaver")
    assert (gone["reason"], gone["explanation"]) == ("popular", [])
    assert http.get("/v1/users/leaver").status_code == 404
    assert history(http, "leaver") == []
    store(http, sent[:1])  # its id is free again
    assert reasons(http, "leaver") == ["leaver-0"]


def test_deleted_event_is_absent_and_a_second_delete_is_404(http: httpx.Client) -> None:
    store(http, events("deleter", 3))
    assert http.delete("/v1/users/deleter/history/deleter-1").status_code == 204
    assert reasons(http, "deleter") == ["deleter-0", "deleter-2"]
    for user, event in (("deleter", "deleter-1"), ("deleter", "what"), ("other", "deleter-0")):
        assert http.delete(f"/v1/users/{user}/history/{event}").status_code == 404


def test_merge_unites_histories_and_profiles(http: httpx.Client) -> None:
    """A merged user scores as one with both histories and profiles; the source is unknown."""
    visitor, member = events("visitor", 3), events("member", 3, genre=1)
    store(http, visitor + member)
    http.put("/v1/users/visitor", json={"interests": ["music"]}).raise_for_status()
    http.put("/v1/users/member", json={"interests": ["history"]}).raise_for_status()
    # Ties in time: the member's own events come first.
    both = events("both", 3, genre=1, prefix="b") + events("both", 3, prefix="v")
    store(http, both)
    http.put("/v1/users/both", json={"interests": ["history", "music"]}).raise_for_status()

    merged = http.post("/v1/users/member/merge", json={"from": "visitor"})
    assert merged.json() == {"moved": 3}
    assert score(http, "member")["parts"] == pytest.approx(score(http, "both")["parts"], abs=1e-5)
    assert sorted(history(http, "member")) == sorted(e["event_id"] for e in visitor + member)
    assert http.get("/v1/users/member").json()["interests"] == ["history", "music"]
    assert score(http, "visitor")["reason"] == "popular"
    assert http.post("/v1/users/member/merge", json={"from": "visitor"}).json() == {"moved": 0}
    assert http.post("/v1/users/member/merge", json={"from": "member"}).status_code == 422


def test_a_profile_alone_makes_an_answer_personal(http: httpx.Client) -> None:
    """Interests without any event make the next answer personal."""
    assert score(http, "novice")["reason"] == "popular"
    for interests, genre in ((["music"], "music"), ([item_id(1, 4)], "cooking")):
        http.put("/v1/users/novice", json={"interests": interests}).raise_for_status()
        asked = {"user_id": "novice", "limit": 5}
        offers = http.post("/v1/recommend", json=asked).json()
        assert offers["items"][0]["reason"] in {"content", "personal"}
        names = [item["item_id"] for item in offers["items"]]
        if offers["model_version"] == "untrained":
            assert sum(name.startswith(genre) for name in names) >= 4, names
        (reason,) = score(http, "novice")["explanation"]
        assert reason["type"] == "profile"


def test_late_events_take_their_place_in_time(http: httpx.Client) -> None:
    """Scores and history follow the times of events, not their order of arrival."""
    sent = events("ordered", 8)
    store(http, sent)
    shuffled = [event | {"user_id": "late", "event_id": f"late-{event['event_id']}"}
                for event in sent]  # fmt: skip
    order = np.random.default_rng(0).permutation(len(sent))
    for place in order:
        store(http, [shuffled[place]])
        score(http, "late")  # so that the next event is added to what is remembered
    assert score(http, "late")["parts"] == pytest.approx(score(http, "ordered")["parts"], abs=1e-6)
    assert history(http, "late") == [f"late-{name}" for name in history(http, "ordered")]
