"""The doctor on a PostgreSQL database: each planted fault is found, a sound one has none."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import psycopg
import pytest

from service.domain.records import Event
from service.jobs.job import Job
from service.maintenance import doctor
from service.maintenance.backup import back_up
from service.maintenance.copying import copy_store
from service.maintenance.doctor import diagnose
from service.maintenance.doctor_checks import SERVER_CHECKS, Finding, run_checks
from service.maintenance.installation import Disk, summarise, summarise_database
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.shared_registry import KIND, SharedRegistry
from service.stores.postgres.connections import Connections
from service.stores.postgres.server_state import (
    OpenTransaction,
    ServerState,
    Standby,
    TableState,
    read_server,
)
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.store import SQLiteStore
from tests.support import full_store
from tests.support.command_line import Heed
from tests.support.postgres_cluster import PostgresCluster
from tests.support.postgres_server import PostgresDatabases, PostgresServer
from tests.support.stores import run_on
from tests.support.tiny import World
from tests.support.waiting import eventually

pytestmark = pytest.mark.verify

ROOMY = Disk(10**12, 9 * 10**11)


class Sound(NamedTuple):
    """A sound installation: its server, its database and a machine's directory."""

    server: PostgresServer
    url: str  # as a role that is no superuser
    data: Path
    world: World


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No service answers, and the environment has no settings."""
    monkeypatch.setattr(doctor, "read_metrics", lambda *_: None)
    for name in [name for name in os.environ if name.startswith("HEED_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that keeps what it acknowledges, with a role for Heed."""
    with PostgresServer(fsync=True) as server:
        _execute(server.url(), "CREATE ROLE heed LOGIN IN ROLE pg_monitor")
        yield server


@pytest.fixture(scope="module")
def installed(
    server: PostgresServer, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Sound:
    """The small world in a database: trained, private and backed up. Tests have copies of it."""
    folder = tmp_path_factory.mktemp("installed")
    url = _given(server, server.create_database())
    data = world.copy(folder / "data")
    data.chmod(0o700)

    async def move() -> None:
        source, target = SQLiteStore(data / STORE_FILE), PostgresStore(url)
        await copy_store(source, target, "the world")
        await source.close()
        files = target.shared.files(KIND)
        for version in (world.second, world.first):
            SharedRegistry(data / MODELS_FOLDER, files).activate(version)
        await target.close()

    asyncio.run(move())
    (data / STORE_FILE).unlink()
    back_up(data, folder / "backup", settings={}, store=url)
    return Sound(server, url, data, world)


@pytest.fixture
def sound(installed: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sound:
    """A copy of the installation for one test."""
    server, world = installed.server, installed.world
    url = _given(server, server.copy_database(installed.url))
    monkeypatch.setenv("HEED_STORE", url)
    return Sound(server, url, shutil.copytree(installed.data, tmp_path / "data"), world)


def _given(server: PostgresServer, created: str) -> str:
    """Give a database to the role for Heed; return its URL as that role."""
    _execute(server.url(), f"ALTER DATABASE {created.rpartition('/')[2]} OWNER TO heed")
    return created.replace("postgres@", "heed@")


def examine(data: Path, **options: Any) -> list[Finding]:
    """All findings but notes, on a disk with room."""
    findings = diagnose(data, {}, **{"disk": ROOMY} | options)
    return [each for each in findings if each.severity != "note"]


def codes(data: Path, **options: Any) -> set[str]:
    return {each.code for each in examine(data, **options)}


def found(state: ServerState, **changes: Any) -> set[str]:
    """The codes of what the checks of a server find in a state."""
    changed = state._replace(**changes)
    return {each.code for each in run_checks(SERVER_CHECKS, changed, 1)}


def state_of(url: str) -> ServerState:
    connections = Connections(url)
    try:
        return read_server(connections)
    finally:
        connections.abandon()


def test_a_sound_installation(sound: Sound) -> None:
    """Nothing is wrong, the one disk is a note, and no file of SQLite is made or looked for."""
    assert codes(sound.data) == set()
    assert {each.code for each in diagnose(sound.data, {}, disk=ROOMY)} == {"one-disk"}
    assert not (sound.data / STORE_FILE).exists()
    nowhere = sound.data.with_name("nowhere")  # a machine that serves nothing
    assert codes(nowhere) == {"no-backup"}
    assert not nowhere.exists()


def test_a_server_that_does_not_answer(
    sound: Sound, heed: Heed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said which server, which setting, and why; the host is looked at all the same."""
    with PostgresServer() as other:
        url = other.url().replace("postgres@", "postgres:secret@")
    monkeypatch.setenv("HEED_STORE", url)
    assert codes(sound.data, disk=Disk(10**12, 10**10)) >= {
        "store-unreachable",
        "disk-nearly-full",
    }
    said = heed("doctor", "--data", sound.data, "--json")
    assert said.code == 1
    finding = json.loads(said.out)[0]
    assert finding["code"] == "store-unreachable"
    assert "127.0.0.1" in finding["what"]
    assert "HEED_STORE" in finding["todo"]
    assert "secret" not in said.out


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("synchronous_commit", "off", "asynchronous-commit"),
        ("full_page_writes", "off", "torn-pages"),
        ("autovacuum", "off", "no-autovacuum"),
        ("synchronous_standby_names", "ANY 1 (a, b)", "missing-standby"),
    ],
)
def test_settings_of_the_server(sound: Sound, setting: str, value: str, code: str) -> None:
    """Each that breaks a promise is found, alone."""
    sound.server.configure(setting, value)
    try:
        eventually(lambda: codes(sound.data) == {code})  # once the server has read it
    finally:
        _execute(sound.server.url(), f"ALTER SYSTEM RESET {setting}")
        _execute(sound.server.url(), "SELECT pg_reload_conf()")


def test_a_server_of_tests_keeps_nothing(postgres: PostgresDatabases, tmp_path: Path) -> None:
    """Without fsync, and as a superuser; the role of Heed sees less, and says so."""
    url = postgres.create_database()
    asyncio.run(PostgresStore(url).close())
    assert found(state_of(url)) == {"no-fsync", "superuser", "one-disk"}


def test_what_a_role_does_not_see(sound: Sound) -> None:
    """A role without pg_read_all_stats is told what was not checked."""
    _execute(sound.server.url(), "REVOKE pg_monitor FROM heed")
    try:
        assert "unseen-statistics" in {each.code for each in diagnose(sound.data, {}, disk=ROOMY)}
    finally:
        _execute(sound.server.url(), "GRANT pg_monitor TO heed")


def test_open_transactions(sound: Sound) -> None:
    """Sessions that hold back followers, or vacuum, are read; long ones are found."""
    with psycopg.connect(sound.server.url()) as writing, psycopg.connect(sound.url) as reading:
        writing.execute("SELECT pg_current_xact_id()")
        reading.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reading.execute("SELECT 1")
        by_pid = {each.pid: each for each in state_of(sound.url).transactions}
        writer = by_pid[writing.info.backend_pid]
        reader = by_pid[reading.info.backend_pid]
        assert (writer.writes, reader.writes) == (True, False)
        assert writer.state == reader.state == "idle in transaction"
    state = state_of(sound.url)
    assert not found(state) & {"idle-transaction", "long-transaction"}
    for status, seconds, expected in (
        ("idle in transaction", 61.0, {"idle-transaction"}),
        ("idle in transaction", 59.0, set()),
        ("active", 299.0, set()),
        ("active", 301.0, {"long-transaction"}),
    ):
        each = OpenTransaction(7, "shop", "psql", status, seconds, writes=True)
        assert found(state, transactions=(each,)) - {"one-disk"} == expected


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": 120_020}, "old-server"),
        ({"schema": 0}, "no-store"),
        ({"schema": 1}, "older-schema"),
        ({"schema": 1_000}, "newer-schema"),
        ({"unfinished_restore": "backup of 2026"}, "unfinished-restore"),
        ({"checksum_failures": 1}, "damaged-pages"),
        ({"clock_ahead": -3.0}, "clocks-differ"),
        ({"host": "db.example.org", "has_tls": False}, "no-tls"),
        ({"prepared": (("x", 100.0),)}, "prepared-transaction"),
        ({"unused_slots": (("old", 10**9),)}, "unused-slot"),
        ({"connections": 90}, "few-connections"),
        ({"machines": 9}, "few-connections"),
        ({"tables": (TableState("users", 10**5, 10**6),)}, "dead-rows"),
        ({"transaction_age": 600_000_000}, "old-transaction-ids"),
    ],
)
def test_states_of_the_server(sound: Sound, changes: dict[str, Any], code: str) -> None:
    """Each state that cannot be planted in a moment is found where it is read."""
    state = state_of(sound.url)
    assert found(state) == {"one-disk"}
    assert found(state, **changes) == {"one-disk", code}
    assert found(state, host="db.example.org", has_tls=True) == {"one-disk"}


def test_standbys() -> None:
    """One that commits wait for, one that they do not, and one that is gone."""
    with PostgresCluster() as cluster:
        url = cluster.primary.url()
        standing = {"no-fsync", "superuser", "no-store"}
        state = state_of(url)
        assert found(state) == standing
        assert [each.sync_state for each in state.standbys] == ["quorum"]
        late = Standby("node1", "streaming", "quorum", 31.0, 0)
        assert found(state, standbys=(late,)) == standing | {"standby-behind"}
        cluster.primary.configure("synchronous_commit", "remote_write")
        eventually(lambda: found(state_of(url)) == standing | {"unconfirmed-standby"})
        cluster.primary.configure("synchronous_commit", "on")
        cluster.require_standby(False)
        eventually(lambda: found(state_of(url)) == standing | {"asynchronous-standbys"})
        cluster.require_standby(True)
        cluster.standbys[0].kill()
        eventually(lambda: found(state_of(url)) == standing | {"missing-standby"})


def test_a_schema_that_is_behind_is_not_migrated(sound: Sound, heed: Heed) -> None:
    """The command says so, and leaves it to the service."""
    _execute(sound.url, "DELETE FROM heed.migrations WHERE number > 3")
    said = heed("doctor", "--data", sound.data, "--json")
    assert [each["code"] for each in json.loads(said.out)] == ["older-schema", "one-disk"]
    with psycopg.connect(sound.url) as connection:
        row = connection.execute("SELECT max(number) FROM heed.migrations").fetchone()
    assert row == (3,)


def test_contents(sound: Sound) -> None:
    """Faults of the log, of counts and of jobs are found as in a directory."""
    lost = [Event("u1", f"lost-{n}", timestamp=time.time_ns() // 1000) for n in range(50)]
    run_on(PostgresStore(sound.url), lambda store: store.append(lost))
    (finding,) = examine(sound.data)
    assert (finding.code, finding.namespace) == ("unknown-items", "default")
    assert finding.what.startswith("50 of 530 events (9%)")
    job = Job("20260101t120000-000000", "running", {}, 1)
    store = PostgresStore(sound.url)
    store.shared.jobs.add(job.id, job.to_json(), 9)
    lease = store.shared.jobs.try_lease()
    assert lease is not None
    assert "interrupted-job" not in codes(sound.data), "it runs"
    lease.release()
    assert "interrupted-job" in codes(sound.data)
    asyncio.run(store.close())
    _execute(sound.url, "DELETE FROM heed.tallies WHERE item_no > 0")
    assert "wrong-counts" in codes(sound.data)


def test_a_damaged_model(sound: Sound) -> None:
    """A flipped bit of a chunk is found."""
    _execute(
        sound.url,
        "UPDATE heed.file_chunks SET data = set_byte(data, 0, get_byte(data, 0) # 1)"
        " WHERE (set_no, chunk_no) IN (SELECT set_no, 0 FROM heed.file_sets WHERE name = %s)",
        sound.world.second,
    )
    (finding,) = examine(sound.data)
    assert finding.code == "damaged-model"
    assert sound.world.second in finding.what


def test_namespaces(sound: Sound) -> None:
    """All are looked at, or the one that is named; one that is missing is said."""
    events = [Event("guest", f"i{n}", type="dislike", timestamp=n) for n in range(200)]
    run_on(PostgresStore(sound.url, namespace="shop"), lambda store: store.append(events))
    faults = {"unknown-items", "only-dislikes", "one-user"}
    assert codes(sound.data) == faults
    assert {each.namespace for each in examine(sound.data)} == {"shop"}
    assert codes(sound.data, namespace="shop") == faults
    assert codes(sound.data, namespace="other") == {"no-namespace"}


def test_both_stores_are_summarised_alike(postgres: PostgresDatabases, tmp_path: Path) -> None:
    """The summaries of a store and of its copy in PostgreSQL are equal."""
    url = postgres.create_database()

    async def fill() -> int:
        source, target = SQLiteStore(tmp_path / "heed.db"), PostgresStore(url)
        await full_store.fill(source)
        await copy_store(source, target, "here")
        await source.close()
        await target.close()
        return time.time_ns() // 1000

    tomorrow = asyncio.run(fill())
    connection = apsw.Connection(str(tmp_path / "heed.db"), vfs=checksum_vfs())
    expected = summarise(connection, tomorrow)
    connection.close()
    with psycopg.connect(url) as server:
        found = summarise_database(server, 1, tomorrow)
    assert found.mean_weight == pytest.approx(expected.mean_weight)  # summed in another order
    assert found._replace(mean_weight=0) == expected._replace(mean_weight=0)
    assert expected.future_events == 0 < expected.unknown_item_events


def _execute(url: str, statement: str, *values: object) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode(), values)
