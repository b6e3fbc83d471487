"""The operator's pages, docs/operate, run command by command, and what comes of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from service.domain.records import Event, User
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.guided import Block, GuidedShell, read_blocks
from tests.support.heed_process import PATIENCE
from tests.support.tiny import World

USER = "maria-4711"  # as the guide names the user
SECRETS = (USER.encode(), b"evt4711", b"orchids4711")


class Walked(NamedTuple):
    """The guide, gone through to its end, with the service running."""

    shell: GuidedShell
    events: dict[str, set[str]]  # ids of the stored events, by the section after which they were


def stored(data: Path) -> set[str]:
    """Return the ids of all stored events."""
    store = SQLiteStore(data / STORE_FILE)
    try:
        return {event.event_id or "" for event in store.scan_events()}
    finally:
        asyncio.run(store.close())


async def add_user(data: Path) -> None:
    """Store a profile and events that can be found in any file by their names."""
    store = SQLiteStore(data / STORE_FILE)
    await store.put_user(User(USER, attributes={"likes": "orchids4711"}))
    events = [Event(USER, f"space-0{n}", f"evt4711-{n}", timestamp=10**15) for n in range(3)]
    await store.append(events)
    await store.close()


@pytest.fixture(scope="module")
def walked(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walked]:
    """Run all blocks in order; after the backup, an event is written that is not in it."""
    folder = tmp_path_factory.mktemp("guide")
    shell = GuidedShell(folder)
    world.copy(shell.data)
    asyncio.run(add_user(shell.data))
    events = {}
    try:
        for block in read_blocks():
            shell.run(block)
            events[block.section] = stored(shell.data)
            if block.section == "Back up":
                late = {"events": [{"event_id": "late", "user_id": "u1", "item_id": "space-00"}]}
                assert post(shell, "/v1/events", "admin.key", late) == 200
        yield Walked(shell, events)
    finally:
        shell.stop()
    assert "Traceback" not in shell.logs.read_text()


def post(shell: GuidedShell, path: str, key: str, body: object) -> int:
    """Send a request with a key from one of the guide's files; return the status."""
    token = (shell.folder / key).read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(shell.url + path, json=body, headers=headers, timeout=PATIENCE).status_code


def test_a_restored_backup_is_what_was_backed_up(walked: Walked) -> None:
    """The restored store has the events of the backup, without the one that was written later."""
    assert walked.events["Back up"] == walked.events["Restore"]
    assert "late" not in walked.events["Restore"]
    assert not (walked.shell.folder / "data.old").exists()


def test_a_salvaged_store_has_every_event(walked: Walked) -> None:
    assert walked.events["Salvage"] == walked.events["Restore"]
    assert (walked.shell.folder / "damaged.db").exists()


def test_a_rotated_key_is_refused_and_the_next_accepted(walked: Walked) -> None:
    """The revoked key gets 401, its successor and the administrator's key are answered."""
    body = {"user_id": "u1", "limit": 1}
    statuses = [
        post(walked.shell, "/v1/recommend", key, body)
        for key in ("shop.key", "shop-2.key", "admin.key")
    ]
    assert statuses == [401, 200, 200]


def test_a_forgotten_user_is_in_no_file(walked: Walked) -> None:
    """No file of the data directory, the backups and the log names the user."""
    shell = walked.shell

    def naming() -> list[Path]:
        places = [*shell.data.rglob("*"), *shell.backups.rglob("*"), shell.logs]
        return [
            path
            for path in places
            if path.is_file() and any(secret in path.read_bytes() for secret in SECRETS)
        ]

    until = time.monotonic() + PATIENCE / 4
    while naming() and time.monotonic() < until:
        time.sleep(0.05)
    assert naming() == []
    assert not any(event.startswith("evt4711") for event in stored(shell.data))
    ledger = json.loads((shell.backups / "forgotten.json").read_text())
    assert [entry["events"] for entry in ledger] == [3]
    assert (shell.backups / "monday" / "backup.json").exists()


def test_key_files_are_their_owners_alone(walked: Walked) -> None:
    """Nobody else can read the files that hold keys."""
    for name in ("admin.key", "admin.header", "shop.key"):
        assert (walked.shell.folder / name).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "print()"),
        ("sh", "no-such-program"),
        ("sh", "false\ntrue"),
        ("sh", "docker compose exec database ls"),
        ("ini", "[Service]\nExecStart=/opt/heed/bin/heed serve --wrkers 2\n"),
    ],
)
def test_a_block_that_cannot_be_run_fails(language: str, text: str, tmp_path: Path) -> None:
    """Another language, a program or service that is missing, and a failing command are errors."""
    with pytest.raises(AssertionError):
        GuidedShell(tmp_path).run(Block("Added", language, text))
