"""SIGKILL of a real server during writes: acknowledged writes are stored exactly once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.support.server import PATIENCE, Server

KILLS = 3
CLIENTS = 4
USERS = 6

Batch = list[dict[str, Any]]


@dataclass
class Ledger:
    """What was sent and what was acknowledged, kept outside of the server and its directory."""

    sent: list[Batch] = field(default_factory=list)
    acknowledged: list[Batch] = field(default_factory=list)
    items: set[str] = field(default_factory=set)  # acknowledged
    enough: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


def write(url: str, name: str, ledger: Ledger) -> None:
    """Send batch after batch, and an item with each, until the server is gone."""
    random = np.random.default_rng([ord(letter) for letter in name])
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        for number in range(1_000_000):
            batch: Batch = [
                {
                    "user_id": f"u{random.integers(USERS)}",
                    "item_id": f"i{random.integers(100)}",
                    "event_id": f"{name}-{number}-{n}",
                    "type": str(random.choice(["view", "buy"])),
                    "weight": float(random.integers(1, 9)),
                    "timestamp": f"2026-01-01T12:00:{random.integers(10, 60)}Z",
                }
                for n in range(int(random.integers(1, 20)))
            ]
            if number % 7 == 0:
                batch[0]["key"] = [float(number)] * 256
            item = {"item_id": f"{name}-{number}", "title": f"title {number}"}
            ledger.sent.append(batch)
            try:
                answer = http.post("/v1/events", json={"events": batch})
                assert answer.json()["stored"] == len(batch)
                ledger.acknowledged.append(batch)
                assert http.post("/v1/items", json={"items": [item]}).json() == {"stored": 1}
                ledger.items.add(item["item_id"])
            except httpx.TransportError:
                return
            ledger.enough.release()


def stored(http: httpx.Client) -> dict[str, dict[str, Any]]:
    """All events that the server has, by id; each once."""
    found: list[dict[str, Any]] = []
    for user in range(USERS):
        cursor: dict[str, str] = {}
        while True:
            params = {"limit": "1000", **cursor}
            page = http.get(f"/v1/users/u{user}/history", params=params).json()
            found += page["events"]
            if page["cursor"] is None:
                break
            cursor = {"cursor": page["cursor"]}
    by_id = {event["event_id"]: event for event in found}
    assert len(by_id) == len(found)
    return by_id


def check(http: httpx.Client, ledger: Ledger) -> None:
    """Acknowledged ⊆ stored ⊆ sent, batches whole, and memories agree with the store."""
    found = stored(http)
    for batch in ledger.acknowledged:
        assert all(event["event_id"] in found for event in batch), "an acknowledged event is lost"
    sent = {event["event_id"]: event for batch in ledger.sent for event in batch}
    for event_id, event in found.items():
        original = {"key": None, "value": None} | sent[event_id]
        assert event == original
    for batch in ledger.sent:
        assert len({event["event_id"] in found for event in batch}) == 1, "half a batch"
    for user in range(USERS):
        own = {e["event_id"] for e in found.values() if e["user_id"] == f"u{user}" and e["key"]}
        body = {"memory": {"user_id": f"u{user}"}, "query": {"text": "title"}, "limit": 1000}
        # Of the items only the vectors of events are known here.
        assert set(http.post("/v1/attend", json=body).json()["ids"]) == own
    for item in ledger.items:
        assert http.get(f"/v1/items/{item}").status_code == 200


def test_acknowledged_writes_survive_sigkill(tmp_path: Path) -> None:
    """A server killed repeatedly during writes restarts with every acknowledged write."""
    random = np.random.default_rng(5)
    ledger = Ledger()
    cut_off = 0
    for kill in range(KILLS):
        with Server(tmp_path / "data") as server, server.client() as http:
            check(http, ledger)
            for batch in ledger.sent:  # what was never answered is sent again, as clients do
                if batch not in ledger.acknowledged:
                    answer = http.post("/v1/events", json={"events": batch}).json()
                    assert answer["stored"] + answer["duplicates"] == len(batch)
                    ledger.acknowledged.append(batch)
            writers = [
                threading.Thread(target=write, args=(server.url, f"k{kill}c{n}", ledger))
                for n in range(CLIENTS)
            ]
            for writer in writers:
                writer.start()
            for _ in range(int(random.integers(20, 60))):
                assert ledger.enough.acquire(timeout=PATIENCE)
            threading.Event().wait(random.uniform(0, 0.02))  # somewhere within the next writes
            server.kill()
            for writer in writers:
                writer.join()
            cut_off += len(ledger.sent) - len(ledger.acknowledged)
    assert cut_off > 0
    with Server(tmp_path / "data") as server, server.client() as http:
        check(http, ledger)
