"""The doctor: each fault that is planted is found, a sound installation has none."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from service.domain.keys import issue_key
from service.domain.records import Event, Item
from service.domain.settings import Settings
from service.maintenance import doctor, doctor_checks
from service.maintenance.backup import back_up
from service.maintenance.doctor import diagnose
from service.maintenance.doctor_checks import (
    HOST_CHECKS,
    LOG_CHECKS,
    NAMESPACE_CHECKS,
    SERVER_CHECKS,
    Finding,
)
from service.maintenance.installation import DAY, Disk, KeyRefused, read_metrics
from service.runtime.data_layout import (
    CHECKPOINT_FILE,
    EMBEDDINGS_FILE,
    MODELS_FOLDER,
    STORE_FILE,
    UNFINISHED_RESTORE,
)
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.store import SQLiteStore
from tests.support.command_line import Heed
from tests.support.old_stores import to_version
from tests.support.server import Server
from tests.support.stores import run_on
from tests.support.tiny import World

ROOMY = Disk(10**12, 9 * 10**11)
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No service answers, and the environment has no settings."""
    monkeypatch.setattr(doctor, "read_metrics", lambda *_: None)
    for name in [name for name in os.environ if name.startswith("HEED_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def sound(world: World, tmp_path: Path) -> Path:
    """A sound installation: trained, private and backed up."""
    data = world.copy(tmp_path / "data")
    data.chmod(0o700)
    back_up(data, tmp_path / "backup", settings={})
    return data


def examine(data: Path, environment: dict[str, str] | None = None, **options: Any) -> list[Finding]:
    """All findings but notes, on a disk with room."""
    findings = diagnose(data, environment or {}, **{"disk": ROOMY} | options)
    return [each for each in findings if each.severity != "note"]


def codes(data: Path, environment: dict[str, str] | None = None, **options: Any) -> set[str]:
    return {each.code for each in examine(data, environment, **options)}


def new_store(data: Path, events: Sequence[Event]) -> Path:
    """A directory with these events and the items that they name."""
    items = [Item(each) for each in {event.item_id for event in events}]
    run_on(
        SQLiteStore(data / STORE_FILE),
        lambda store: store.put_items(items),
        lambda store: store.append(events),
    )
    data.chmod(0o700)
    return data


def now() -> int:
    return time.time_ns() // 1000


def spread(count: int, **fields: Callable[[int], Any]) -> list[Event]:
    """Events of many users on many items, a second apart; fields are functions of a number."""
    start = now() - count * SECOND
    drawn = {
        "user_id": lambda n: f"u{n % 20}",
        "item_id": lambda n: f"i{n % 30}",
        "timestamp": lambda n: start + n * SECOND,
        **fields,
    }
    return [Event(**{name: value(n) for name, value in drawn.items()}) for n in range(count)]


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("only-dislikes", {"type": lambda _: "dislike"}),
        ("one-user", {"user_id": lambda n: "guest" if n % 10 else f"u{n}"}),
        ("one-item", {"item_id": lambda _: "i1"}),
        ("equal-times", {"timestamp": lambda _: 1_700_000_000 * SECOND}),
        ("future-events", {"timestamp": lambda n: now() + (n + 2) * DAY}),
        ("heavy-weights", {"weight": lambda n: 1e6 if n == 7 else 0.1}),
        ("ratings-as-weights", {"weight": lambda n: float(1 + n % 5)}),
    ],
)
def test_faults_of_the_log(code: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Each is found in a log that has it, alone among the checks of the log."""
    count = 2_000 if code == "heavy-weights" else 200
    found = codes(new_store(tmp_path / "data", spread(count, **fields)))
    assert found == {code, "no-backup"}
    assert codes(new_store(tmp_path / "plain", spread(200))) == {"no-backup"}


def test_events_of_unknown_items(sound: Path) -> None:
    _append(sound, [Event("u1", f"lost-{n}", timestamp=now()) for n in range(50)])
    (finding,) = [each for each in examine(sound) if each.code == "unknown-items"]
    assert finding.what.startswith("50 of 530 events (9%)")
    assert finding.namespace == "default"


def test_untrained_types_and_an_old_model(sound: Path) -> None:
    """A type that came after the training, and a log that outgrew the model, are found."""
    items = [f"space-{n:02}" for n in range(15)]
    events = [
        Event(f"u{n % 40}", items[n % 15], type="lend", timestamp=now() - n) for n in range(900)
    ]
    _append(sound, events)
    assert codes(sound) == {"untrained-types", "old-model"}


def test_another_encoder(sound: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and embeddings of another encoder, missing ones, and no encoder at all."""

    class Other:
        name = "other"

    with monkeypatch.context() as patch:
        patch.setattr(doctor, "open_encoder", lambda _: Other())
        assert codes(sound) == {"other-encoder", "other-embeddings"}
    (sound / EMBEDDINGS_FILE).unlink()
    assert codes(sound) == {"missing-embeddings"}
    monkeypatch.setenv("HEED_ENCODER", "no_such_package")
    assert "no-encoder" in codes(sound)


def test_a_damaged_model(sound: Path, world: World) -> None:
    """One flipped bit of the weights is found, and the file is named."""
    path = sound / MODELS_FOLDER / "versions" / world.second / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
    (finding,) = examine(sound)
    assert finding.code == "damaged-model"
    assert f"{world.second}/weights.safetensors" in finding.what


def test_a_damaged_store(sound: Path) -> None:
    """A flipped bit in any page of the store is found."""
    path = sound / STORE_FILE
    content = path.read_bytes()
    for page in range(1, len(content) // 4096, 7):
        damaged = bytearray(content)
        damaged[4096 * page + 2000] ^= 1
        path.write_bytes(damaged)
        assert "damaged-store" in codes(sound), page
    path.unlink()
    assert "no-store" in codes(sound)


def test_counts_that_differ(sound: Path) -> None:
    _execute(sound / STORE_FILE, "UPDATE state SET events = events + 1")
    assert codes(sound) == {"wrong-counts"}


def test_schemas_of_other_versions(sound: Path) -> None:
    """An older schema is a warning, a newer one an error; neither is changed."""
    to_version(sound / STORE_FILE, SCHEMA_VERSION - 1)
    assert codes(sound) == {"older-schema"}
    connection = sqlite3.connect(sound / STORE_FILE)
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION - 1,)
    connection.close()
    _execute(sound / STORE_FILE, "PRAGMA user_version = 99")
    assert codes(sound) == {"newer-schema"}


def test_leftovers_of_interrupted_work(sound: Path) -> None:
    """A checkpoint, a job without a process and a marker of a restore are found."""
    (sound / CHECKPOINT_FILE).write_bytes(b"state")
    job = {"id": "20260101t120000-000000", "state": "running", "options": {}, "created": 1}
    (sound / "jobs").mkdir(exist_ok=True)
    (sound / "jobs" / "20260101t120000-000000.json").write_text(json.dumps(job))
    (sound / UNFINISHED_RESTORE).touch()
    assert codes(sound) == {"unfinished-training", "interrupted-job", "unfinished-restore"}


def test_faults_of_the_host(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk, clock, permissions and the age of the backup."""
    assert codes(sound, disk=Disk(10**12, 10**10)) == {"disk-nearly-full"}
    # Before the model was published, which is before its backup too.
    assert codes(sound, now=now() - 9 * 365 * DAY) >= {"clock-behind", "future-events"}
    assert codes(sound, now=now() + 8 * DAY) == {"old-backup"}
    assert codes(sound, now=now() + 8 * DAY, backup_days=30) == set()
    sound.chmod(0o777)
    assert codes(sound) == {"writable-by-others"}


def test_faults_of_the_settings(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Misspelt variables, invalid values and open addresses."""
    (finding,) = examine(sound, {"HEED_DEADLIN": "1"})
    assert finding.code == "unknown-variable"
    assert "HEED_DEADLINE" in finding.what
    monkeypatch.setenv("HEED_HOST", "0.0.0.0")
    assert [each.severity for each in examine(sound) if each.code == "open-address"] == ["error"]
    monkeypatch.setenv("HEED_INSECURE", "true")
    monkeypatch.setenv("HEED_ALLOWED_HOSTS", "*")
    assert codes(sound) == {"open-address", "any-host"}
    monkeypatch.setenv("HEED_PORT", "many")
    assert codes(sound) == {"invalid-setting"}


def test_a_small_cache(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size while nothing runs, by hits while the service does."""
    monkeypatch.setenv("HEED_HISTORY_CACHE_BYTES", "1000")
    assert codes(sound) == {"cache-small"}
    for hits, expected in ((900.0, {"cache-misses"}), (9_000.0, set())):
        counts = {
            'heed_cache_hits_total{cache="history"}': hits,
            'heed_cache_misses_total{cache="history"}': 2_000.0,
        }
        monkeypatch.setattr(doctor, "read_metrics", lambda *_, counts=counts: counts)
        assert codes(sound) == expected


def test_a_service_with_keys(sound: Path, tmp_path: Path) -> None:
    """Metrics are read with the caller's key or the service's own; without one, a note says so."""
    key, token = issue_key("shop", frozenset({"read"}), 0)
    run_on(SQLiteStore(sound / STORE_FILE), lambda store: store.add_key(key))
    kept = tmp_path / "metrics.key"
    with Server(sound, metrics_key_file=kept) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(KeyRefused, match="401"):
            read_metrics(Settings(data=sound, port=port), {})
        with pytest.raises(KeyRefused, match="403"):
            read_metrics(Settings(data=sound, port=port), {"HEED_API_KEY": token})
        metrics = read_metrics(Settings(data=sound, port=port, metrics_key_file=str(kept)), {})
        assert metrics is not None
        assert metrics["heed_ready"] == 1
        again = read_metrics(
            Settings(data=sound, port=port), {"HEED_API_KEY": kept.read_text().strip()}
        )
        assert again is not None


def test_refused_metrics_are_a_note(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that need a key are a note, and nothing is wrong."""

    def refuse(*_: object) -> None:
        raise KeyRefused("The running service answers /metrics with 401")

    monkeypatch.setattr(doctor, "read_metrics", refuse)
    (note,) = [each for each in diagnose(sound, {}, disk=ROOMY) if each.code == "metrics-refused"]
    assert note.severity == "note"
    assert "HEED_API_KEY" in note.todo


def test_the_command(sound: Path, heed: Heed) -> None:
    """The exit code says whether something is wrong; the table and the JSON say what."""
    said = heed("doctor", "--data", sound, "--json")
    assert [each for each in json.loads(said.out) if each["severity"] != "note"] == []
    assert said.code == 0
    sound.chmod(0o770)
    said = heed("doctor", "--data", sound, "--json")
    assert said.code == 1
    (finding,) = [each for each in json.loads(said.out) if each["severity"] != "note"]
    assert finding["code"] == "writable-by-others"
    assert finding["todo"].startswith("chmod")
    said = heed("doctor", "--data", sound)
    assert said.code == 1
    assert "writable-by-others" in said.out
    assert heed("doctor", "--data", sound / "nowhere").code == 1


def _append(data: Path, events: Sequence[Event]) -> None:
    run_on(SQLiteStore(data / STORE_FILE), lambda store: store.append(events))


def _execute(path: Path, statement: str) -> None:
    connection = apsw.Connection(str(path), vfs=checksum_vfs())
    connection.execute(statement)
    connection.close()


def test_each_condition_has_sentences_and_each_sentence_a_condition() -> None:
    """The table of findings has a row for each name in the code, and no other."""
    folder = Path(doctor_checks.__file__).parent
    source = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    tables = (HOST_CHECKS, NAMESPACE_CHECKS, LOG_CHECKS, SERVER_CHECKS)
    assert {name for table in tables for name in table} <= set(doctor_checks.FINDINGS)
    used = {"newer-schema/file", "older-schema/file"}  # named in two parts
    missing = [name for name in doctor_checks.FINDINGS if f'"{name}"' not in source]
    assert set(missing) <= used
