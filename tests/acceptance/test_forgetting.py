"""A real server that forgets a user, and one whose data directory is removed."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

from tests.support.command_line import Heed
from tests.support.server import PATIENCE, Server
from tests.support.tiny import World

SECRETS = [b"maria-4711", b"maria@example.org", b"orchids4711", b"evt4711", b"only4711"]
HELD = re.compile(r"^heed_cache_users\{.*\} (.*)$", re.MULTILINE)


def names(directory: Path) -> list[str]:
    """Return the files of a directory that name the user."""
    contents = {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    return sorted(
        file.relative_to(directory).as_posix()
        for file, content in contents.items()
        if any(secret in content for secret in SECRETS)
    )


def test_a_forgotten_user_is_in_no_file_and_no_answer(
    world: World, heed: Heed, tmp_path: Path
) -> None:
    """With two workers that have answered the user, nothing names the user after forgetting."""
    data = world.copy(tmp_path / "data")
    with Server(data, workers=2) as server:
        user = "/v1/users/maria-4711"
        for _ in range(6):  # each on a connection of its own, to either worker
            with server.client() as http:
                http.put(
                    user,
                    json={
                        "attributes": {"email": "maria@example.org"},
                        "interests": ["orchids4711"],
                    },
                ).raise_for_status()
                events = [
                    {"user_id": "maria-4711", "item_id": item, "event_id": f"evt4711-{item}"}
                    for item in ("only4711", "i1", "i2")
                ]
                http.post("/v1/events", json={"events": events}).raise_for_status()
                answer = http.post("/v1/recommend", json={"user_id": "maria-4711", "limit": 3})
                assert answer.status_code == 200
        assert names(data)
        with server.client() as http:
            assert http.delete(user).json() == {"forgotten": 3}
            assert http.get(user).status_code == 404
            until = time.monotonic() + PATIENCE / 4
            while names(data) and time.monotonic() < until:
                time.sleep(0.05)
            assert names(data) == []
            while set(HELD.findall(http.get("/metrics").text)) != {"0.0"}:
                assert time.monotonic() < until, HELD.findall(http.get("/metrics").text)
                time.sleep(0.05)
        assert not any(secret.decode() in server.log() for secret in SECRETS)
    assert names(data) == []
    ledger = tmp_path / "ledger.json"
    assert heed("forgotten", "list", "--data", data, "--json", ledger).code == 0
    assert [entry["events"] for entry in json.loads(ledger.read_text())] == [3]
    assert b"maria" not in ledger.read_bytes()
    assert heed("forgotten", "verify", "maria-4711", "--data", data).code == 0
    assert heed("forgotten", "verify", "u1", "--data", data).code == 1
    # A backup of before, restored beside the ledger of the lost store.
    older = world.copy(tmp_path / "older")
    assert "0 users" in heed("forgotten", "apply", ledger, "--data", older).out
    said = heed("forgotten", "apply", tmp_path / "nothing.json", "--data", older)
    assert (said.code, "nothing.json" in said.err) == (1, True)


def test_events_into_a_removed_directory_are_refused(world: World, tmp_path: Path) -> None:
    """Once the data directory is removed, no event is acknowledged, and the service not ready."""
    data = world.copy(tmp_path / "data")
    with Server(data) as server, server.client() as http:
        event = {"user_id": "u1", "item_id": "i1"}
        assert http.post("/v1/events", json={"events": [event]}).status_code == 200
        shutil.rmtree(data)
        codes = [http.post("/v1/events", json={"events": [event]}).status_code for _ in range(50)]
        assert set(codes) == {500}
        ready = http.get("/health/ready")
        assert ready.status_code == 503
        assert "deleted" in ready.json()["checks"]["details"]["store"]["problem"]
        server.kill()
