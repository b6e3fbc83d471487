"""The load test against a fake server that stalls, refuses or hangs up."""

from __future__ import annotations

import io
import json
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvloop
from rich.console import Console

from service.domain.errors import Unavailable
from service.lab.load_options import Options
from service.lab.load_report import render_page
from service.lab.load_test import run
from service.lab.open_loop import ALL, OpenLoop, draw_schedule, summarize
from tests.support.loadtest_fake import ITEMS, USERS, Fake, faking

pytestmark = pytest.mark.verify

BASE = Options("", rate=100.0, duration=1.0, warmup=0.0, arrivals="constant", users=10)


def ran(fake: Fake, **options: Any) -> tuple[dict[str, Any], str]:
    """The report of a load test of a fake, and its output."""
    shown = io.StringIO()
    found = run(Console(file=shown, width=200), replace(BASE, url=fake.url, **options))
    return json.loads(json.dumps(found, allow_nan=False)), shown.getvalue()


# ------------------------------------------------------------------------------ latency


def test_stall_delays_every_request_due_during_it() -> None:
    stalled: list[float] = []

    def stall(fake: Fake, kind: str, number: int) -> int:
        if number == 50:
            stalled.append(time.perf_counter())
            time.sleep(0.5)
            stalled.append(time.perf_counter())
        return 200

    with faking(stall) as fake:
        options = replace(BASE, url=fake.url, duration=1.5, mix="score=1", connections=1)
        planned = draw_schedule(100.0, options)
        load = OpenLoop(options, planned, lambda *_: ("/v1/score", b"{}"))
        record = uvloop.run(load.run())
    began, ended = (moment - load._started for moment in stalled)
    took = record.done - planned.due
    early = (planned.due >= began) & (planned.due < ended - 0.4)
    assert early.sum() >= 5
    assert (took[early] >= 0.4).all()
    # Requests that were due later in the stall waited until its end at least.
    inside = (planned.due >= began) & (planned.due < ended)
    assert inside.sum() >= 45
    assert (took[inside] >= ended - planned.due[inside]).all()
    found = summarize(record)
    assert found["kinds"][ALL]["latency"]["max"] >= 0.4
    # The delay is the server's, and is not said to be the generator's.
    assert found["generator"]["waited_for_a_connection"]["max"] >= 0.4
    assert found["generator"]["late"]["p50"] < 0.1


# ------------------------------------------------------------------------------ what failed


def test_errors_are_counted_by_kind_and_by_what_they_were() -> None:
    made: Counter[str] = Counter()

    def fail(fake: Fake, kind: str, number: int) -> int | None:
        if not number:
            return 200
        error = {"score": {0: "503", 1: "hung up"}, "search": {0: "429", 1: "timeout"}}
        why = error[kind].get(number % 4)
        with fake.lock:
            made[f"{kind} {why}"] += 1
        if why == "timeout":
            time.sleep(3.0)
        return None if why == "hung up" else int(why) if why and why.isdigit() else 200

    with faking(fail) as fake:
        found, shown = ran(fake, mix="score=1,search=1", timeout=1.5, rate=60.0)
    kinds = found["load"]["kinds"]
    for kind in ("score", "search"):
        expected = {
            name.removeprefix(f"{kind} "): count
            for name, count in made.items()
            if name.startswith(kind) and not name.endswith("None")
        }
        assert kinds[kind]["errors"] | kinds[kind]["refused"] == expected
        assert kinds[kind]["successes"] == made[f"{kind} None"]
        assert kinds[kind]["requests"] == sum(expected.values()) + made[f"{kind} None"]
    assert set(kinds[ALL]["refused"]) == {"503", "429"}
    assert set(kinds[ALL]["errors"]) == {"hung up", "timeout"}
    assert found["load"]["details"]["score 503"] == (
        '{"items": [], "model_version": "m-1", "status": 503}'
    )
    assert "Errors" in shown
    assert "Refused" in shown


def test_a_server_that_stops_answering_ends_the_test_with_what_there_was() -> None:
    dead = threading.Event()

    def die(fake: Fake, kind: str, number: int) -> int | None:
        if number > 20:
            dead.wait(30)
            return None
        return 200

    def no(self: object) -> None:
        raise OSError

    with faking(die) as fake:
        # Nothing is deleted either.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.support.loadtest_fake._Handler.do_DELETE", no)
            found, shown = ran(fake, mix="events=1", duration=60.0, silence=1.0, timeout=20.0)
        dead.set()
    assert found["ended"] == "silent"
    assert "stopped answering" in shown
    assert found["load"]["kinds"][ALL]["successes"] == 20
    assert found["load"]["kinds"][ALL]["unfinished"] > 0
    assert found["load"]["kinds"][ALL]["errors"] == {}
    left = found["cleaning"]["left"]
    assert left
    assert all(path.startswith("/v1/users/loadtest-") for path in left)
    assert f"curl -X DELETE '{fake.url}/v1/users/loadtest-" in shown
    assert "stopped answering" in render_page(found)


def test_what_refuses_or_is_not_there_is_said_before_any_load() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        run(Console(file=io.StringIO()), replace(BASE, url="http://127.0.0.1:9"))
    with faking(lambda *_: 422) as fake:
        with pytest.raises(Unavailable, match="POST /v1/score was answered with 422"):
            ran(fake)
        assert sum(fake.asked.values()) == 1


# ------------------------------------------------------------------------------ what is asked


def test_the_mix_is_what_arrives_and_is_about_what_the_server_has() -> None:
    """Kinds are counted as the server counts them, over its own users, items and titles."""
    with faking() as fake:
        found, shown = ran(fake, mix="score=4,recommend=2,search=3,events=1", targets=5, limit=3)
    kinds = found["load"]["kinds"]
    assert kinds[ALL]["requests"] == 100
    for kind in ("score", "recommend", "search", "events"):
        assert kinds[kind]["requests"] == kinds[kind]["successes"] == fake.asked[kind] - 1
    for body in fake.bodies["score"]:
        assert body["user_id"] in USERS
        assert len(set(body["item_ids"])) == 5
        assert set(body["item_ids"]) <= set(ITEMS[1:])  # i0 is hidden
    assert all(body["limit"] == 3 for body in fake.bodies["recommend"] + fake.bodies["search"])
    titles = " / ".join(f"Title of {item}" for item in ITEMS)
    assert all(body["query"] in titles for body in fake.bodies["search"])
    ids = [body["events"][0]["event_id"] for body in fake.bodies["events"]]
    assert len(set(ids)) == len(ids)  # none is a duplicate, which would cost the server less
    for said in ("constant arrivals", "100 a second", "m-1", fake.url):
        assert said in shown
    assert "49 items and 10 users are requested" in shown


def test_events_are_for_users_of_the_tests_own_who_are_then_forgotten() -> None:
    with faking() as fake:
        ran(fake, mix="events=1")
        written = {body["events"][0]["user_id"] for body in fake.bodies["events"]}
        assert all(user.startswith("loadtest-") for user in written)
        assert set(fake.deleted) == {f"/v1/users/{user}" for user in written}
        assert "loadtest-of-another-run" not in written
        fake.deleted.clear()
        found, shown = ran(fake, mix="events=1", keep=True)
        assert fake.deleted == []
        assert "they stay" in shown
        assert found["cleaning"]["kept"]


def test_a_busy_server_is_waited_for_when_events_are_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A DELETE that is refused for load is sent again, so that nothing is left."""
    monkeypatch.setattr("service.lab.workload.time.sleep", lambda seconds: None)
    with faking() as fake:
        fake.busy = 3
        found, _ = ran(fake, mix="events=1")
        assert fake.busy == 0
        written = {body["events"][0]["user_id"] for body in fake.bodies["events"]}
    assert set(fake.deleted) == {f"/v1/users/{user}" for user in written}
    assert found["cleaning"]["left"] == []
    assert found["cleaning"]["taken_back"] == len(written)  # the fake says one of each user


def test_events_without_an_answer_are_looked_for_again() -> None:
    """Unanswered events may be written late: their users are deleted a second time."""
    with faking(lambda fake, kind, number: None if number == 9 else 200) as fake:
        found, _ = ran(fake, mix="events=1")
    users = {body["events"][0]["user_id"] for body in fake.bodies["events"]}
    assert Counter(fake.deleted) == {f"/v1/users/{user}": 2 for user in users}
    assert found["cleaning"]["events"] == found["cleaning"]["acknowledged"] + 1


def test_what_is_left_by_a_load_that_never_began_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first request that is refused ends the test; what was written before it is not lost."""
    monkeypatch.setattr("service.lab.load_test.delete_all", lambda _, paths: (0, list(paths)))
    shown = io.StringIO()
    with faking(lambda fake, kind, number: 422 if kind == "score" else 200) as fake:
        options = replace(BASE, url=fake.url, mix="events=1,score=1")
        with pytest.raises(Unavailable, match="/v1/score was answered with 422"):
            run(Console(file=shown, width=200), options)
    assert f"left by the load test: curl -X DELETE '{fake.url}/v1/users/" in shown.getvalue()


def test_users_of_a_load_test_that_was_killed_are_named() -> None:
    """Users of an earlier run are neither asked for nor deleted; a command says how to."""
    with faking() as fake:
        fake.users = ["loadtest-0123abcd-0", "loadtest-0123abcd-2", *USERS]
        _, shown = ran(fake, mix="score=1")
        assert fake.deleted == []
    assert "an earlier load test left users" in shown
    assert f"curl -X DELETE '{fake.url}/v1/users/loadtest-0123abcd-{{0,1,2}}'" in shown


def test_a_key_goes_with_every_request_and_into_no_report() -> None:
    with faking() as fake:
        fake.key = "Bearer s3cret"
        with pytest.raises(Unavailable, match="--header"):
            ran(fake)
        found, shown = ran(fake, header=["Authorization: Bearer s3cret"], mix="events=1")
        assert found["load"]["kinds"][ALL]["errors"] == {}
        assert fake.deleted
        assert "s3cret" not in shown + json.dumps(found) + render_page(found)


def test_ctrl_c_ends_the_removal_and_names_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt after the load stops the DELETEs, and the report lists the paths left."""
    real = httpx.Client.delete

    def interrupted(http: httpx.Client, path: str) -> httpx.Response:
        answer = real(http, path)
        signal.raise_signal(signal.SIGINT)
        return answer

    monkeypatch.setattr(httpx.Client, "delete", interrupted)
    with faking() as fake:
        found, shown = ran(fake, mix="events=1")
        assert len(fake.deleted) == 1
    written = {body["events"][0]["user_id"] for body in fake.bodies["events"]}
    assert sorted(found["cleaning"]["left"]) == sorted(f"/v1/users/{user}" for user in written)
    assert f"curl -X DELETE '{fake.url}/v1/users/loadtest-" in shown


# ------------------------------------------------------------------------------ ramp


def test_ramp_finds_the_capacity_of_a_server() -> None:
    left, at = 5.0, time.perf_counter()  # how many more it takes at once

    def bear(fake: Fake, kind: str, number: int) -> int:
        nonlocal left, at
        with fake.lock:
            now = time.perf_counter()
            left, at = min(5.0, left + 30.0 * (now - at)), now
            if left < 1.0:
                return 503
            left -= 1.0
            return 200

    with faking(bear) as fake:
        found, shown = ran(
            fake,
            rate=20.0,
            duration=1.0,
            mix="score=1",
            ramp=True,
            slo_ms=5e3,
            slo_percentile=80.0,
            max_rate=500.0,
        )
    ramp = found["ramp"]
    assert 30 <= ramp["held"] < ramp["broke"] <= 1.05 * ramp["held"] <= 52.5
    assert [step["held"] for step in ramp["steps"][:3]] == [True, True, False]
    assert all(step["refused"].keys() == {"503"} for step in ramp["steps"] if not step["held"])
    assert f"held up to {ramp['held']:,.1f} requests a second" in shown
    assert found["load"]["requests_per_second"] == pytest.approx(ramp["held"], rel=0.05)
    assert "Steps of the ramp" in render_page(found)


def test_an_objective_without_a_ramp_is_judged() -> None:
    with faking(lambda fake, kind, number: 503 if number % 10 == 5 else 200) as fake:
        found, _ = ran(fake, mix="score=1", slo_ms=5e3, slo_percentile=80.0)
        assert found["load"]["slo"]["held"]
        assert found["load"]["slo"]["within"] == pytest.approx(0.9, abs=0.011)
        found, shown = ran(fake, mix="score=1", slo_ms=5e3, slo_percentile=95.0)
        assert not found["load"]["slo"]["held"]
        assert "does not hold" in shown
