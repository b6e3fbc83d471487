"""API keys of real servers: rotation under load, several workers, the first key."""

from __future__ import annotations

import json
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.command_line import Heed
from tests.support.heed_process import HeedProcess
from tests.support.server import PATIENCE, Server
from tests.support.waiting import eventually
from tests.support.workers import children

CREATE = ("keys", "create", "--name", "shop")


def create(heed: Heed, data: Path, *options: str) -> str:
    """Create a key beside a running server, as an operator does, and return its token."""
    said = heed(*CREATE, "--data", data, *options)
    assert said.code == 0, said.err
    return said.out.strip()


def bearer(token: str) -> dict[str, str]:
    """The headers of a request with a key."""
    return {"authorization": f"Bearer {token}"}


def statuses(server: Server, token: str, count: int) -> list[int]:
    """The statuses of requests over connections of their own, which the workers share."""
    headers = {**bearer(token), "connection": "close"}
    with server.client() as http:
        return [http.get("/v1/users", headers=headers).status_code for _ in range(count)]


def test_keys_rotate_under_load_without_a_failed_request(heed: Heed, tmp_path: Path) -> None:
    """Clients change from one key to the next while both are valid, and no request fails.

    Two workers serve. Once the earlier key is revoked, neither of them takes it any more; a rate
    is counted over both; and no key is in the log.
    """
    data = tmp_path / "data"
    with Server(data, workers=2) as server:
        assert httpx.get(f"{server.url}/v1/users").status_code == 200
        earlier = create(heed, data, "--scope", "read", "--scope", "write")
        assert statuses(server, "wrong", 8) == [401] * 8
        current = [earlier]
        answers: list[tuple[str, int]] = []
        stop = threading.Event()

        def load() -> None:
            with server.client() as http:
                while not stop.is_set():
                    token = current[0]
                    event = {"user_id": "u", "item_id": "i"}
                    write = http.post("/v1/events", json={"events": [event]}, headers=bearer(token))
                    read = http.get("/v1/users/u/history", headers=bearer(token))
                    answers.extend((token, one.status_code) for one in (write, read))

        def answered(token: str) -> Callable[[], bool]:
            return lambda: sum(used == token for used, _ in list(answers)) > 40

        clients = [threading.Thread(target=load) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            eventually(answered(earlier))
            later = create(heed, data, "--scope", "read", "--scope", "write")
            current[0] = later
            eventually(answered(later))
        finally:
            stop.set()
            for client in clients:
                client.join(PATIENCE)
        # All clients have changed to the later key: what still comes with the earlier is refused.
        assert heed("keys", "revoke", "--data", data, earlier[5:17]).code == 0
        assert statuses(server, earlier, 12) == [401] * 12
        assert statuses(server, later, 12) == [200] * 12
        assert {status for _, status in answers} == {200}
        assert {token for token, _ in answers} == {earlier, later}
        limited = create(heed, data, "--scope", "read", "--rate", "10/d")
        assert sorted(statuses(server, limited, 24)) == [200] * 10 + [429] * 14
        assert len(children(server.pid)) == 2
        log = server.log() + server.process.out()
        assert not [token for token in (earlier, later, limited) if token[18:] in log]


def test_an_exposed_service_gets_its_first_key(heed: Heed, tmp_path: Path) -> None:
    """Without keys every address is refused; with `--first-key` one key is made, once."""
    data = tmp_path / "data"
    settings = {"HEED_HOST": "0.0.0.0", "HEED_PORT": "0", "HEED_DEADLINE": "60"}
    said = heed("serve", "--host", "0.0.0.0", "--data", data)
    assert (said.code, "heed keys create" in said.err) == (1, True)
    tokens: list[str] = []
    for _ in range(2):
        log = tmp_path / f"log{len(tokens)}"
        process = HeedProcess(
            *("serve", "--first-key", "--data", data), log=log, environment=settings
        )
        eventually(lambda: "Heed serves " in process.out() or not process.is_alive)  # noqa: B023
        out = " ".join(process.out().split())
        port = out.partition("Heed serves port ")[2].split()[0]
        path = data / "admin.key"
        assert f"cat {path}" in out
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        token = path.read_text().strip()
        tokens.append(token)
        assert token not in out + process.log()
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/v1/users").status_code == 401
        assert httpx.get(f"{url}/health/ready").json() == {"ready": True}
        assert httpx.get(f"{url}/metrics", headers=bearer(token)).status_code == 200
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    assert tokens[0] == tokens[1]


def test_a_load_test_takes_a_key(
    heed: Heed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`heed loadtest` is refused without a key, and runs with one from a file or a variable."""
    data, report, file = tmp_path / "data", tmp_path / "report.json", tmp_path / "key"
    load = ("loadtest", "--rate", "30", "--duration", "0.5", "--warmup", "0", "--mix", "events=1")
    with Server(data) as server, server.client() as http:
        items = {"items": [{"item_id": "i", "title": "An item"}]}
        events = {"events": [{"user_id": "u", "item_id": "i"}]}
        assert http.post("/v1/items", json=items).status_code == 200
        assert http.post("/v1/events", json=events).status_code == 200
        token = create(heed, data, "--scope", "read", "--scope", "write")
        refused = heed(*load, "--url", server.url)
        assert (refused.code, "HEED_API_KEY" in refused.err) == (1, True)
        file.write_text(f"{token}\n")
        said = heed(*load, "--url", server.url, "--key-file", file, "--json", report)
        assert said.code == 0, said.err
        assert json.loads(report.read_text())["load"]["kinds"]["all"]["errors"] == {}
        assert token[18:] not in report.read_text() + said.out
        monkeypatch.setenv("HEED_API_KEY", token)
        assert heed(*load, "--url", server.url).code == 0
        header = f"Authorization: Bearer {token}"
        monkeypatch.setenv("HEED_API_KEY", "stale")
        assert heed(*load, "--url", server.url, "--header", header).code == 0


def test_a_key_for_prometheus_is_kept_in_a_file(heed: Heed, tmp_path: Path) -> None:
    """It reads the metrics alone, outlives a restart, and is made anew where it is lost."""
    data, kept = tmp_path / "data", tmp_path / "keys" / "metrics.key"
    kept.parent.mkdir()
    with Server(data, metrics_key_file=kept) as server, server.client() as http:
        assert http.get("/v1/users").status_code == 200
        assert not kept.exists(), "a first key would have locked every client out"
    create(heed, data, "--scope", "read")
    tokens = []
    for lost in (False, False, True):
        if lost:
            kept.write_text("heed_of another installation")
        with Server(data, metrics_key_file=kept) as server, server.client() as http:
            tokens.append(kept.read_text().strip())
            assert stat.S_IMODE(kept.stat().st_mode) == 0o640
            assert http.get("/metrics").status_code == 401
            assert http.get("/metrics", headers=bearer(tokens[-1])).status_code == 200
            for method, path in (("GET", "/v1/users"), ("POST", "/v1/events")):
                assert http.request(method, path, headers=bearer(tokens[-1])).status_code == 403
            earlier = http.get("/metrics", headers=bearer(tokens[0])).status_code
            assert earlier == (401 if lost else 200)
    assert tokens[0] == tokens[1] != tokens[2]
    with Server(data, metrics_key_file=tmp_path / "missing" / "key") as server:
        assert "no key could be kept" in server.log()
