"""Tenants of one installation: a key opens the namespace that it was made for, and no other."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from service.domain.errors import NotFound
from service.domain.keys import ApiKey, Scope, issue_key
from service.domain.settings import Settings
from service.engine.namespaces import Namespaces
from service.http.app import create_app
from service.maintenance.backup import DirectoryParts, back_up
from service.maintenance.restore import restore, restore_to_database
from service.maintenance.store_places import parse_place
from service.runtime.data_layout import NAMESPACE_ID_FILE, SEARCH_FILE
from service.stores.namespace_directory import open_directory
from service.stores.opening import open_store
from service.stores.postgres.namespaces import _TABLES
from tests.support.postgres_server import PostgresDatabases

ITEM = {"items": [{"item_id": "one", "title": "a kettle"}]}
# Requests of tenants, about data and about the process.
REQUESTS = (
    ("GET", "/v1/items", None),
    ("POST", "/v1/items", ITEM),
    ("GET", "/v1/users", None),
    ("POST", "/v1/search", {"query": "kettle"}),
    ("POST", "/v1/batch", {"requests": [{"path": "/v1/items/one"}]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/jobs", None),
    ("GET", "/v1/scenarios", None),
    ("GET", "/metrics", None),
)


class Site:
    """An installation, served in this process, with keys and commands beside the service."""

    def __init__(self, data: Path, store: str, runner: asyncio.Runner) -> None:
        self.data, self.store, self.runner = data, store, runner
        self.app = create_app(Settings(data=data, store=store, deadline=60))
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    @property
    def namespaces(self) -> Namespaces:
        """The engines of the service."""
        found: Namespaces = self.app.state.namespaces
        return found

    def create(self, name: str) -> str:
        """Create a namespace beside the service, which knows it when this returns; its id."""
        with self._directory() as directory:
            directory.create(name)
        # The directory shares the service's notices, which may not have the namespace yet.
        own_id = parse_place(self.store or str(self.data)).namespace_id(name)
        assert own_id is not None
        self.until(lambda: not self.namespaces.is_gone(name, own_id))
        return own_id

    def remove(self, name: str) -> None:
        """Remove a namespace beside the service, which knows it when this returns."""
        with self._directory() as directory:
            directory.remove(name)
        self.until(lambda: self.namespaces.is_gone(name, None))

    def issue(self, namespace: str, *scopes: Scope, own_id: str | None = None) -> str:
        """Store a key as `heed keys create` does, for a namespace as it is or once was."""
        key, token = issue_key(f"of-{namespace}", frozenset(scopes), 1, namespace=namespace)
        if own_id is None:
            with self._directory() as directory:
                own_id = directory.namespace_id(namespace)
        self.change(replace(key, namespace_id=own_id or ""))
        return token

    def change(self, key: ApiKey) -> None:
        """Store a key by another process."""

        async def add() -> None:
            store = open_store(self.data, self.store)
            await store.add_key(key)
            await store.close()

        self.runner.run(add())
        keys = self.namespaces.default.store
        version = self.runner.run(keys.keys_version())
        self.until(lambda: keys.announced_keys() >= version)

    def ask(
        self, method: str, path: str, body: Any = None, token: str | None = None
    ) -> httpx.Response:
        """Send a request."""
        return self.runner.run(self.send(method, path, body, token))

    async def send(self, method: str, path: str, body: Any, token: str | None) -> httpx.Response:
        """Send a request from a coroutine of the service's loop."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        more = {} if body is None else {"json": body}
        return await self.http.request(method, path, headers=headers, **more)

    def until(self, holds: Callable[[], bool]) -> None:
        """Let the service run until something holds."""
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end
            self.runner.run(asyncio.sleep(0.01))

    @contextmanager
    def _directory(self) -> Iterator[Any]:
        directory = open_directory(self.data, self.store)
        try:
            yield directory
        finally:
            directory.close()


@pytest.fixture(params=["folders", "database"])
def site(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresDatabases
) -> Iterator[Site]:
    """A service over either store."""
    store = "" if request.param == "folders" else postgres.create_database()
    with asyncio.Runner() as runner:
        site = Site(tmp_path / "data", store, runner)
        lifespan = site.app.router.lifespan_context(site.app)
        runner.run(lifespan.__aenter__())
        try:
            yield site
        finally:
            runner.run(site.http.aclose())
            runner.run(lifespan.__aexit__(None, None, None))


# ------------------------------------------------------------------------ state


def test_a_key_sees_the_state_of_its_namespace_alone(site: Site) -> None:
    """Names and models of other namespaces are for the operator: an admin of `default`."""
    tokens = {}
    for name in ("acme", "globex"):
        site.create(name)
        tokens[name] = site.issue(name, "admin")
        assert site.ask("POST", "/v1/items", ITEM, tokens[name]).status_code == 200
    scopes: tuple[Scope, ...] = ("read", "write", "train")
    others = {scope: site.issue("default", scope) for scope in scopes}
    for token in (*tokens.values(), *others.values()):
        state = site.ask("GET", "/health/ready", token=token).json()
        assert state["checks"]["store"] is True
        assert "namespaces" not in state["checks"]
        assert "acme" not in str(state)
        assert "globex" not in str(state)
    for scope in ("admin", "metrics"):
        token = site.issue("default", scope)
        checks = site.ask("GET", "/health/ready", token=token).json()["checks"]
        assert set(checks["namespaces"]) == {"acme", "globex"}
        assert 'namespace="globex"' in site.ask("GET", "/metrics", token=token).text
    for wrong in (None, "heed_000000000000_" + "A" * 43):
        assert site.ask("GET", "/health/ready", token=wrong).json() == {"ready": True}
    for method, path, body in REQUESTS:
        answer = site.ask(method, path, body, tokens["acme"])
        assert answer.status_code == 200, answer.text
        assert "globex" not in answer.text
        assert 'namespace="default"' not in answer.text


def test_a_header_names_the_namespace_where_no_key_does(site: Site) -> None:
    """Without keys each namespace is beside `default`; from the first key on, a key's is it."""
    site.create("acme")

    def titles(namespace: str, token: str | None = None) -> tuple[int, list[str]]:
        headers = {"heed-namespace": namespace}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        answer = site.runner.run(site.http.get("/v1/items", headers=headers))
        return answer.status_code, [item["title"] for item in answer.json().get("items", [])]

    sent = site.runner.run(
        site.http.post("/v1/items", json=ITEM, headers={"heed-namespace": "acme"})
    )
    assert sent.status_code == 200
    assert titles("acme") == (200, ["a kettle"])
    assert titles("default") == (200, [])
    assert [titles(name)[0] for name in ("globex", "../acme", "")] == [404] * 3
    token = site.issue("acme", "read")
    assert titles("acme", token) == (200, ["a kettle"])
    assert titles("default", token)[0] == 403
    assert titles("acme")[0] == 401


def test_a_probe_hears_no_reason(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the service is not ready, a key sees the checks; other clients see only the status."""
    token = site.issue("default", "read")
    monkeypatch.setattr("service.engine.monitoring.MIN_FREE_BYTES", 1 << 62)
    refused, seen = site.ask("GET", "/health/ready"), site.ask("GET", "/health/ready", token=token)
    assert (refused.status_code, seen.status_code) == (503, 503)
    assert "disk" in seen.json()["detail"]
    assert seen.json()["checks"]["disk"] is False
    assert "checks" not in refused.json()
    assert not any(word in refused.text for word in ("disk", "store", "worker"))


# ------------------------------------------------------------------------ removal


def test_keys_go_with_their_namespace(site: Site) -> None:
    """After a removal its keys open nothing, not even a later namespace of the same name."""
    site.create("acme")
    old = site.issue("acme", "admin")
    assert site.ask("POST", "/v1/items", ITEM, old).status_code == 200
    site.remove("acme")
    assert site.ask("GET", "/v1/items", token=old).status_code in (401, 404)
    site.create("acme")
    new = site.issue("acme", "admin")
    assert site.ask("GET", "/v1/items", token=new).json()["items"] == []
    for method, path, body in REQUESTS:
        assert site.ask(method, path, body, old).status_code == 401
    assert site.ask("GET", "/health/ready", token=old).json() == {"ready": True}
    # Counts of the former namespace are not this one's.
    counted = site.ask("GET", "/metrics", token=new).text
    line = r'^heed_namespace_requests_total{.*namespace="acme",.*status="200"} (.+)$'
    assert re.findall(line, counted, re.MULTILINE) == ["1.0"]
    keys = {key.revoked is None for key in site.runner.run(_keys(site)) if key.created == 1}
    assert keys == {True, False}


async def _keys(site: Site) -> list[ApiKey]:
    return await site.namespaces.default.store.keys()


def test_a_key_that_survives_its_namespace_opens_nothing(site: Site) -> None:
    """A key that comes back, by a restore or from another machine, is of the former namespace."""
    former = site.create("acme")
    site.remove("acme")
    latter = site.create("acme")
    assert former != latter
    survivor = site.issue("acme", "admin", own_id=former)
    nameless = site.issue("acme", "admin", own_id="")  # of an earlier version
    for token in (survivor, nameless):
        for method, path, body in REQUESTS:
            refused = site.ask(method, path, body, token)
            assert (refused.status_code, "removed" in refused.json()["detail"]) == (401, True)
        assert site.ask("GET", "/health/ready", token=token).json() == {"ready": True}

    async def use_late() -> None:  # authenticated before the removal, and admitted after it
        async with site.namespaces.lease("acme", former):
            pass

    with pytest.raises(NotFound):
        site.runner.run(use_late())


def test_keys_of_namespaces_of_earlier_versions_open_them(tmp_path: Path) -> None:
    """A namespace without an id is opened by keys without one, until it is removed."""
    with asyncio.Runner() as runner:
        site = Site(tmp_path / "data", "", runner)
        lifespan = site.app.router.lifespan_context(site.app)
        runner.run(lifespan.__aenter__())
        try:
            site.create("acme")
            (site.data / "namespaces" / "acme" / NAMESPACE_ID_FILE).unlink()
            token = site.issue("acme", "admin")
            assert site.ask("POST", "/v1/items", ITEM, token).status_code == 200
            site.remove("acme")
            site.create("acme")
            assert site.ask("GET", "/v1/items", token=token).status_code == 401
        finally:
            runner.run(site.http.aclose())
            runner.run(lifespan.__aexit__(None, None, None))


def test_a_namespace_keeps_its_id_in_backups_and_copies(
    site: Site, tmp_path: Path, postgres: PostgresDatabases
) -> None:
    """Its keys open it where it was restored or copied to, from either store into either."""
    own_id = site.create("acme")
    site.issue("acme", "read")
    back_up(site.data, tmp_path / "backup", settings={}, store=site.store)
    restored = tmp_path / "restored"
    restore(tmp_path / "backup", restored)
    url = postgres.create_database()
    restore_to_database(tmp_path / "backup", url, tmp_path / "machine")
    for data, store in ((restored, ""), (tmp_path / "machine", url)):
        directory = open_directory(data, store)
        assert directory.namespace_id("acme") == own_id
        directory.close()
    for place in (str(tmp_path / "copy"), postgres.create_database()):
        target = parse_place(place)
        asyncio.run(target.open("acme", own_id).close())
        assert target.namespace_id("acme") == own_id
    source = parse_place(site.store or str(site.data))
    assert source.namespace_id("acme") == own_id


@pytest.mark.parametrize("rounds", [3])
def test_requests_during_a_removal_find_nothing(site: Site, rounds: int) -> None:
    """A request during the removal of its namespace is answered, or is 401 or 404."""
    asked = [
        *(each for each in REQUESTS if each[1] != "/metrics"),
        ("POST", "/v1/events", {"events": [{"user_id": "u", "item_id": "one"}]}),
        ("PUT", "/v1/users/u", {"attributes": {"city": "Bonn"}}),
        ("GET", "/v1/users/u/history", None),
        ("PUT", "/v1/scenarios/home", {"question": "popular"}),
        ("POST", "/v1/score", {"user_id": "u", "item_ids": ["one"]}),
        ("POST", "/v1/popular", {}),
        ("DELETE", "/v1/users/u", None),
    ]
    answers: list[httpx.Response] = []

    async def ask_while_removed(token: str) -> None:
        is_over = False

        async def client(number: int) -> None:
            while not is_over:
                for offset in range(len(asked)):
                    method, path, body = asked[(number + offset) % len(asked)]
                    answers.append(await site.send(method, path, body, token))
                    await asyncio.sleep(0.002)  # a refusal waits for nothing

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        await asyncio.sleep(0.2)
        directory = open_directory(site.data, site.store)
        await asyncio.to_thread(directory.remove, "acme")
        directory.close()
        await asyncio.sleep(0.7)  # until a notice has come
        is_over = True
        await asyncio.gather(*clients)

    for _ in range(rounds):
        site.create("acme")
        token = site.issue("acme", "admin")
        site.runner.run(ask_while_removed(token))
    found = {answer.status_code for answer in answers}
    assert found <= {200, 201, 204, 401, 404}, {
        answer.text for answer in answers if answer.status_code >= 405
    }
    assert 200 in found
    assert {401, 404} & found
    for answer in answers:
        if answer.status_code == 200 and "responses" in answer.json():
            assert all(each["status"] in (200, 404) for each in answer.json()["responses"])
    if site.store:
        with psycopg.connect(site.store) as connection:
            for table in _TABLES:
                left = connection.execute(
                    f"SELECT count(*) FROM heed.{table} WHERE NOT namespace_no IN"
                    " (SELECT namespace_no FROM heed.namespaces)".encode()
                )
                assert left.fetchone() == (0,), table


def test_a_backup_does_not_mix_namespaces_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace that is removed while it is backed up is not in it, nor in its successor."""
    data = tmp_path / "data"
    asyncio.run(open_store(data, "").close())
    directory = open_directory(data, "")
    for name in ("acme", "globex"):
        directory.create(name)
    files = DirectoryParts.files

    def remove_meanwhile(self: DirectoryParts, name: str) -> Iterator[tuple[str, Path | bytes]]:
        yield from files(self, name)
        if (data / "namespaces" / name / "models").is_dir():
            directory.remove(name)
            if name == "acme":
                directory.create(name)

    monkeypatch.setattr(DirectoryParts, "files", remove_meanwhile)
    for name in ("acme", "globex"):  # of the former tenants
        (data / "namespaces" / name / "models").mkdir(exist_ok=True)
        (data / "namespaces" / name / SEARCH_FILE).write_text("{}")
    manifest = back_up(data, tmp_path / "backup", settings={})
    assert set(manifest.namespaces) == {"default", "acme"}
    assert [place for place in manifest.files if place.endswith(SEARCH_FILE)] == []
    restored = tmp_path / "restored"
    restore(tmp_path / "backup", restored)
    copy = open_directory(restored, "")
    assert copy.namespace_id("acme") == directory.namespace_id("acme")
