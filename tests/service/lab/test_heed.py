"""`heed loadtest` against the real service: its report, and complete clean-up."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import cli
from service.domain.settings import Settings
from service.http.app import create_app
from service.lab.open_loop import OUTSIDE, WAITED
from tests.support.server import PATIENCE, ROOT
from tests.support.threaded_server import serving_app
from tests.support.tiny import World, items

pytestmark = pytest.mark.verify

Heed = Callable[..., tuple[int, str, str]]
KINDS = ("score", "recommend", "search", "events")


@pytest.fixture(scope="module")
def url(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = world.copy(tmp_path_factory.mktemp("loaded") / "data")
    with serving_app(create_app(Settings(data=data, deadline=60))) as port:
        yield f"http://127.0.0.1:{port}"


def arguments(url: str, *more: object) -> list[str]:
    """A short load test of a server, gentle enough for a busy machine."""
    given = ["--url", url, "--rate", 40, "--duration", 1, "--warmup", 0.25, *more]
    return ["loadtest", *map(str, given)]


@pytest.fixture
def heed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Heed:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*given: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["heed", *given])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def held(http: httpx.Client) -> dict[str, Any]:
    """Return the complete history of every user."""
    users = http.get("/v1/users", params={"limit": 1000}).json()["users"]
    return {
        each["user_id"]: http.get(
            f"/v1/users/{each['user_id']}/history", params={"limit": 1000}
        ).json()
        for each in users
    }


def test_a_load_is_reported_and_leaves_nothing(url: str, heed: Heed, tmp_path: Path) -> None:
    """Every kind of request succeeds, the report is complete, and the data is unchanged."""
    target, html = tmp_path / "found.json", tmp_path / "found.html"
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        before = held(http)
        given = ("--timeout", 60, "--silence", 60, "--json", target, "--html", html)
        code, shown, complaint = heed(*arguments(url, *given))
        assert (code, complaint) == (0, "")
        assert held(http) == before
    found = json.loads(target.read_text())
    assert found["ended"] == "completed"
    kinds = found["load"]["kinds"]
    for kind in KINDS:
        assert kinds[kind]["errors"] == {}
        assert kinds[kind]["successes"] == kinds[kind]["requests"] > 0
    for kind in ("score", "recommend", "search"):
        assert {"attend", "render", OUTSIDE, WAITED} <= found["load"]["stages"][kind].keys()
    assert "store" in found["load"]["stages"]["events"]
    assert found["data"]["items"] == len(items())
    assert found["data"]["users"] == len(before)
    assert found["data"]["events"] == sum(len(each["events"]) for each in before.values())
    assert found["cleaning"]["events"] > 0
    assert found["cleaning"]["left"] == []
    for said in ("Setup", "Latency in ms", "Time by stage", "taken back"):
        assert said in shown
    assert html.read_text().startswith("<!doctype html>")
    memory = found["memory"]
    status = Path("/proc/self/status").read_text()  # the server is on a thread of this process
    now = 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
    assert memory["end"] == pytest.approx(now, rel=0.1)
    assert memory["most"] == max(size for _, size in memory["readings"]) >= memory["start"] > 1e7
    assert f"and {memory['end'] / 2**20:,.0f} at the end" in shown


def test_events_written_for_users_are_taken_out_of_their_histories(
    url: str, heed: Heed, tmp_path: Path
) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        before = held(http)
        given = ["--mix", "events=1", "--write-to-users", "--json", tmp_path / "a.json"]
        assert heed(*arguments(url, "--keep", *given))[0] == 0
        kept = json.loads((tmp_path / "a.json").read_text())["cleaning"]
        during = held(http)
        added = [
            f"/v1/users/{user}/history/{event['event_id']}"
            for user, history in during.items()
            for event in history["events"]
            if event not in before[user]["events"]
        ]
        assert sorted(added) == sorted(kept["left"])
        assert len(added) > 10
        for path in added:
            assert http.delete(path).status_code == 204
        assert held(http) == before
        assert heed(*arguments(url, *given))[0] == 0
        assert held(http) == before
    assert json.loads((tmp_path / "a.json").read_text())["cleaning"]["left"] == []


def trending(http: httpx.Client) -> list[str]:
    """Return the items that trend now."""
    answer = http.post("/v1/popular", json={"by": "trending", "half_life": "1d", "limit": 50})
    return [item["item_id"] for item in answer.raise_for_status().json()["items"]]


def test_nothing_of_a_load_trends_after_it(
    world: World, heed: Heed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that was mostly refused does not change what trends.

    With --keep it is something else, until the command that the report shows is run.
    """
    app = create_app(Settings(data=world.copy(tmp_path / "data"), deadline=60, max_in_flight=1))
    with serving_app(app) as port:
        url = f"http://127.0.0.1:{port}"
        given = arguments(url, "--mix", "score=1,events=4", "--rate", 150, "--users", 5)
        with httpx.Client(base_url=url, timeout=PATIENCE) as http:
            before, users = trending(http), held(http)
            assert heed(*given, "--json", str(tmp_path / "a.json"))[0] == 0
            assert trending(http) == before
            assert heed(*given, "--keep", "--json", str(tmp_path / "b.json"))[0] == 0
            assert trending(http) != before
            kept = json.loads((tmp_path / "b.json").read_text())["cleaning"]
            for command in kept["by_hand"]:
                subprocess.run(["bash", "-c", f"{command} -sf"], check=True, capture_output=True)
            assert trending(http) == before
            assert held(http) == users
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["load"]["kinds"]["events"]["refused"].keys() == {"429"}
    assert found["cleaning"]["taken_back"] == found["cleaning"]["acknowledged"] > 0


def test_ctrl_c_gives_the_report_and_cleans_up(url: str, tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        before = held(http)
        run = subprocess.Popen(
            [
                sys.executable, "-m", "service.cli",
                *arguments(url, "--duration", 600, "--mix", "events=1", "--json", target),
            ],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            events = re.search(
                r"^heed_events\{[^}]*\} ([0-9.e+]+)$", http.get("/metrics").text, re.MULTILINE
            )
            assert events is not None
            if float(events[1]) > sum(len(each["events"]) for each in before.values()) + 40:
                break
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        shown, complaint = run.communicate(timeout=PATIENCE)
        assert (run.returncode, complaint) == (130, "")
        assert held(http) == before
    found = json.loads(target.read_text())
    assert found["ended"] == "stopped"
    assert found["load"]["kinds"]["all"]["successes"] > 10
    assert "Stopped before its end" in shown


def test_invalid_arguments_are_reported(heed: Heed) -> None:
    for given, reason in (
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--mix", "sing=1"], "is no kind of request"),
        (["--header", "x"], "Name: value"),
        (["--html", "nowhere/a.html"], "no folder"),
    ):
        code, _, complaint = heed("loadtest", *given)
        assert code == 1
        assert reason in complaint
