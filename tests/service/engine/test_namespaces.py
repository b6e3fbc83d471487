"""Engines of namespaces: opened once, few at a time, gone when removed, and failing one by one."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from service.domain.records import Event
from service.engine import namespaces as namespace_opening
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE, namespace_names, remove_namespace
from tests.support import tiny
from tests.support.namespaced import NamespacedService, copy_namespace, empty_namespace
from tests.support.server import PATIENCE

WORLD_ITEMS = len(tiny.items())


@contextmanager
def serving(data: Path, **settings: Any) -> Iterator[NamespacedService]:
    """A service over a data directory, with an event loop of its own."""
    with asyncio.Runner() as runner:
        service = NamespacedService(runner, data, **settings)
        try:
            yield service
        finally:
            service.close()


def put(service: NamespacedService, namespace: str, title: str) -> None:
    """Store an item under one id in a namespace."""
    body = {"items": [{"item_id": "one", "title": title}]}
    assert service.ask("POST", "/v1/items", body, namespace).status_code == 200


def title(service: NamespacedService, namespace: str) -> str:
    """Return the title that a namespace has of that item."""
    return str(service.ask("GET", "/v1/items/one", namespace=namespace).json()["title"])


def others(service: NamespacedService) -> set[str]:
    """Return the namespaces that are open beside the default."""
    return service.namespaces.engines().keys() - {"default"}


def open_files() -> list[str]:
    """Return the paths of the files that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            found.append(str(descriptor.readlink()))
    return found


def eventually(service: NamespacedService, held: Callable[[], object]) -> None:
    """Let the service run until this holds."""
    until = time.monotonic() + PATIENCE
    while not held():
        assert time.monotonic() < until
        service.runner.run(asyncio.sleep(0.01))


def slow_opening(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make every opening wait for the event that is returned."""
    go = threading.Event()
    compose = namespace_opening.compose_engine

    def waiting(*args: Any) -> Any:
        assert go.wait(PATIENCE)
        return compose(*args)

    monkeypatch.setattr(namespace_opening, "compose_engine", waiting)
    return go


def test_few_namespaces_are_open_at_once(tmp_path: Path) -> None:
    """If more namespaces are used than may be open, the one unused longest is closed."""
    names = ("a", "b", "c")
    for name in names:
        empty_namespace(tmp_path, name)
    with serving(tmp_path, max_open_namespaces=2) as service:
        assert others(service) == set()  # they are too many to be opened at the start
        for name in names:
            put(service, name, f"of {name}")
        assert others(service) == {"b", "c"}
        assert title(service, "b") == "of b"
        assert title(service, "a") == "of a"  # opened again, with what it has stored
        assert others(service) == {"a", "b"}

        def held() -> set[str]:
            found = open_files()
            return {name for name in names if any(f"/{name}/{STORE_FILE}" in f for f in found)}

        eventually(service, lambda: held() == {"a", "b"})


def test_all_are_opened_at_the_start_if_they_are_few(tmp_path: Path) -> None:
    """A service opens the namespaces that exist before they are needed."""
    for name in ("a", "b"):
        empty_namespace(tmp_path, name)
    with serving(tmp_path, max_open_namespaces=2) as service:
        eventually(service, lambda: others(service) == {"a", "b"})


def test_requests_share_one_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests for a closed namespace wait for one opening, and `default` does not wait."""
    for name in ("a", "b", "c"):
        empty_namespace(tmp_path, name)
    go = slow_opening(monkeypatch)
    opened: list[str] = []
    with serving(tmp_path, max_open_namespaces=2) as service:
        service.namespaces.on_open(lambda name, _: opened.append(name))

        async def ask() -> list[int]:
            first = [asyncio.create_task(service.send("GET", "/v1/items", namespace="a"))
                     for _ in range(20)]  # fmt: skip
            await asyncio.sleep(0.05)
            assert (await service.send("GET", "/v1/items")).status_code == 200
            assert not any(task.done() for task in first)
            go.set()
            return [(await task).status_code for task in first]

        assert service.runner.run(ask()) == [200] * 20
        assert opened == ["default", "a"]


def test_an_opening_outlasts_the_request_that_is_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request past its deadline gets 503 with Retry-After, and the opening goes on."""
    for name in ("a", "b"):
        empty_namespace(tmp_path, name)
    go = slow_opening(monkeypatch)
    with serving(tmp_path, max_open_namespaces=1, deadline=0.1) as service:
        answer = service.ask("GET", "/v1/items", namespace="a")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["detail"].startswith("The namespace 'a' is being opened; send")
        go.set()
        eventually(service, lambda: others(service) == {"a"})


def test_a_namespace_in_use_is_not_closed(tmp_path: Path) -> None:
    """A request waits for room while all open namespaces are in use, until its deadline."""
    for name in ("a", "b"):
        empty_namespace(tmp_path, name)
    with serving(tmp_path, max_open_namespaces=1, deadline=5) as service:

        async def ask() -> None:
            async with service.namespaces.lease("a") as engine:
                waiting = asyncio.create_task(service.send("GET", "/v1/items", namespace="b"))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                await engine.store.append([Event("u", "i")])
            assert (await waiting).status_code == 200

        service.runner.run(ask())
        assert others(service) == {"b"}


def test_a_removed_namespace_is_refused_at_once(tmp_path: Path) -> None:
    """The request after a removal is a 404; no file of it comes back, and a new one is empty."""
    empty_namespace(tmp_path, "a")
    empty_namespace(tmp_path, "b")
    with serving(tmp_path) as service:
        for name in ("a", "b"):
            put(service, name, f"of {name}")
        remove_namespace(tmp_path, "a")
        answer = service.ask("GET", "/v1/items", namespace="a")
        assert answer.status_code == 404
        assert "namespace 'a'" in answer.json()["detail"]
        assert title(service, "b") == "of b"
        eventually(service, lambda: others(service) == {"b"})
        eventually(service, lambda: not service.namespaces._closing)
        assert namespace_names(tmp_path) == ["b"]
        assert [path.name for path in (tmp_path / "namespaces").glob("[!.]*")] == ["b"]
        assert 'namespace="a"' not in service.ask("GET", "/metrics").text
        assert not service.namespaces.has_served("a")  # so that no refusal counts for it

        empty_namespace(tmp_path, "a")
        assert service.ask("GET", "/v1/items", namespace="a").json()["items"] == []
        put(service, "a", "anew")
        remove_namespace(tmp_path, "a")  # and created again before the next request
        empty_namespace(tmp_path, "a")
        assert service.ask("GET", "/v1/items", namespace="a").json()["items"] == []
        put(service, "a", "once more")
        assert title(service, "a") == "once more"
    for name in ("a", "b"):  # what a new service reads
        with serving(tmp_path) as service:
            assert title(service, name) == {"a": "once more", "b": "of b"}[name]


def test_a_namespace_that_is_removed_while_it_opens_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal during an opening leaves no file open, and a request that waits is refused."""
    for name in ("a", "b"):
        empty_namespace(tmp_path, name)
    go, composed = threading.Event(), threading.Event()
    compose = namespace_opening.compose_engine

    def waiting(*args: Any) -> Any:
        engine = compose(*args)
        composed.set()
        assert go.wait(PATIENCE)
        return engine

    monkeypatch.setattr(namespace_opening, "compose_engine", waiting)
    with serving(tmp_path, max_open_namespaces=1, deadline=0.1) as service:
        assert service.ask("GET", "/v1/items", namespace="a").status_code == 503
        assert composed.wait(PATIENCE)
        remove_namespace(tmp_path, "a")
        assert service.ask("GET", "/v1/items", namespace="a").status_code == 404
        go.set()

        eventually(service, lambda: not any(".removed-a" in file for file in open_files()))
        assert [path.name for path in (tmp_path / "namespaces").glob("[!.]*")] == ["b"]


@pytest.mark.parametrize("name", ["nope", "../b", "", ".lock", "B", "a" * 65, "default/"])
def test_an_unknown_namespace_is_never_created(tmp_path: Path, name: str) -> None:
    """A request about a namespace that does not exist is a 404, and creates no file."""
    with serving(tmp_path) as service:
        before = sorted(tmp_path.rglob("*"))
        body = {"items": [{"item_id": "one", "title": "x"}]}
        answer = service.ask("POST", "/v1/items", body, name)
        assert answer.status_code == 404
        assert sorted(tmp_path.rglob("*")) == before
        assert service.ask("GET", "/health/live", namespace=name).status_code == 200


def _zeroed(folder: Path) -> None:
    file = folder / STORE_FILE
    file.write_bytes(b"\0" * 4096 + file.read_bytes()[4096:])


def _unlinked(folder: Path) -> None:
    (folder / STORE_FILE).unlink()


def _bad_model(folder: Path) -> None:
    for file in (folder / MODELS_FOLDER / "versions").glob("*/*.safetensors"):
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "named"),
    [(_zeroed, STORE_FILE), (_unlinked, STORE_FILE), (_bad_model, ".safetensors")],
)
def test_a_damaged_namespace_fails_alone(
    world: tiny.World, tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    """Requests for a damaged namespace are 503; all others are answered, and readiness says why."""
    data = world.copy(tmp_path / "data")
    damage(copy_namespace(world.data, data, "bad"))
    empty_namespace(data, "good")
    with serving(data) as service:
        for _ in range(2):
            answer = service.ask("GET", "/v1/items", namespace="bad")
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert str(data) not in answer.text
        assert service.ask("GET", "/v1/items", namespace="good").status_code == 200
        scored = service.ask("POST", "/v1/score", {"user_id": "u1", "item_ids": ["space-01"]})
        assert scored.json()["model_version"] == world.first
        eventually(service, lambda: others(service) == {"good"})
        ready = service.ask("GET", "/health/ready")
        assert ready.status_code == 200
        checks = ready.json()["checks"]
        good = checks["namespaces"]["good"]
        assert (good["store"], good["model"]) == (True, "untrained")
        assert named in checks["namespaces"]["bad"]["error"]
        assert set(checks["namespaces"]) == {"bad", "good"}
        own = service.ask("GET", "/health/ready", namespace="bad")
        assert own.status_code == 503
        assert "good" not in own.text


def test_a_repaired_namespace_is_served_without_a_restart(tmp_path: Path) -> None:
    """A store that is put back is opened by the next request."""
    folder = empty_namespace(tmp_path, "a")
    kept = (folder / STORE_FILE).read_bytes()
    (folder / STORE_FILE).unlink()
    with serving(tmp_path) as service:
        assert service.ask("GET", "/v1/items", namespace="a").status_code == 503
        (folder / STORE_FILE).write_bytes(kept)
        assert service.ask("GET", "/v1/items", namespace="a").status_code == 200
        assert "error" not in str(service.ask("GET", "/health/ready").json())


def test_metrics_are_labelled_and_shown_to_their_namespace(tmp_path: Path) -> None:
    """Gauges, requests and latencies have the namespace; one that asks sees only its own."""
    empty_namespace(tmp_path, "a")
    with serving(tmp_path) as service:
        put(service, "a", "of a")
        service.ask("GET", "/v1/items/a%2Fb", namespace="a")
        service.ask("GET", "/v1/items", namespace="nope")
        text = service.ask("GET", "/metrics").text
        assert re.search(r'^heed_items{namespace="a"} 1\.0$', text, re.MULTILINE)
        assert re.search(r'^heed_items{namespace="default"} 0\.0$', text, re.MULTILINE)
        counted = r'^heed_namespace_requests_total{.*namespace="a",.*status="%d"} 1\.0$'
        for status in (200, 404):
            assert re.search(counted % status, text, re.MULTILINE)
        assert 'duration_seconds_count{namespace="a"} 2.0' in text
        assert "nope" not in text
        own = service.ask("GET", "/metrics", namespace="a").text
        lines = [line for line in own.splitlines() if line and not line.startswith("#")]
        assert len(lines) > 10
        assert all('namespace="a"' in line for line in lines)


def test_caches_of_all_namespaces_share_one_budget(world: tiny.World, tmp_path: Path) -> None:
    """Open namespaces together keep at most the setting's bytes of users, and a single one all."""
    data = world.copy(tmp_path / "data")
    copy_namespace(world.data, data, "a")
    budget = 200_000
    with serving(data, max_open_namespaces=1, history_cache_bytes=budget) as service:

        def held() -> dict[str, int]:
            engines = service.namespaces.engines()
            return {n: engine.parts.memories.cached_bytes for n, engine in engines.items()}

        def ask(namespace: str) -> None:
            for user in range(40):
                body = {"user_id": f"u{user}", "item_ids": ["space-01"], "at": tiny.AT}
                assert service.ask("POST", "/v1/score", body, namespace).status_code == 200

        ask("default")
        alone = held()["default"]
        assert budget / 2 < alone <= budget
        ask("a")
        eventually(service, lambda: sum(held().values()) <= budget)
        assert held()["a"] > 0
        ask("default")
        ask("a")
        eventually(service, lambda: sum(held().values()) <= budget)
        assert min(held().values()) > 0
