"""Seeded damage of files: bit flips and truncations, looked at by a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from service.domain.errors import Corrupt, HeedError
from service.domain.settings import Settings
from service.http.app import create_app
from service.stores.sqlite.store import SQLiteStore
from tests.faults.matrix import Setup, Verdict
from tests.support.tiny import AT

DAMAGES = 60

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def damaged(setup: Setup) -> Verdict:
    """Flip a bit of a file, or cut it off; compare all events and answers with the intact ones."""
    rng, folder = setup.rng("damage"), setup.fresh("damage")
    right = _look(setup.world.copy(folder / "intact"), folder / "intact.json")
    counts: dict[str, int] = dict.fromkeys(("named", "harmless", "wrong", "signals"), 0)
    times = setup.times(DAMAGES)
    for number in range(times):
        data = setup.world.copy(folder / f"{number}")
        files = sorted(p for p in data.rglob("*") if p.is_file() and p.stat().st_size > 100)
        weights = [8 if p.name == "heed.db" else 1 for p in files]
        _spoil(rng.choices(files, weights)[0], rng)
        seen = _look(data, folder / f"{number}.json")
        kind = (
            "signals"
            if seen is None
            else "named"
            if "error" in seen
            else "harmless"
            if seen == right
            else "wrong"
        )
        counts[kind] += 1
        shutil.rmtree(data)
    weaker = _unchecked(setup)
    return Verdict(
        not counts["wrong"] and not counts["signals"],
        f"{times} damaged files: {counts['named']} found, {counts['harmless']} without effect on "
        f"any answer, {counts['wrong']} wrong answers, {counts['signals']} signals",
        f"without page checksums: {weaker} wrong events of 30 damages",
        weaker > 0,
    )


def _spoil(path: Path, rng: Any) -> None:
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _look(data: Path, out: Path) -> dict[str, Any] | None:
    """Return what a process finds in a data directory; None where a signal ended it."""
    child = _FORKS.Process(target=_find, args=(data, out))
    child.start()
    child.join(120)
    if child.exitcode is None:
        child.kill()
        return None
    if child.exitcode < 0 or not out.exists():
        return None
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _find(data: Path, out: Path) -> None:
    try:
        with TestClient(create_app(Settings(data=data)), base_url="http://localhost") as http:
            store = http.app.state.namespaces.default.store  # type: ignore[attr-defined]
            events = sorted(repr(event) for event in store.scan_events())
            answers = []
            for user in range(5):
                question = {"user_id": f"u{user}", "limit": 10, "at": AT, "explain": 2}
                answer = http.post("/v1/recommend", json=question).json()
                if answer.get("degraded"):
                    raise Corrupt("an intact model answers, and says so")
                if answer.get("title") == "Corrupt":
                    raise Corrupt(answer["detail"])
                answers.append(answer["items"])
        digest = hashlib.sha256("\n".join(events).encode()).hexdigest()
        found = {"events": digest, "answers": answers}
    except HeedError as error:
        found = {"error": str(error)}
    out.write_text(json.dumps(found))


def _unchecked(setup: Setup) -> int:
    """Return how many of 30 damages change events silently, where pages are not verified."""
    rng, folder = setup.rng("unchecked"), setup.fresh("unchecked")
    data = setup.world.copy(folder / "data")

    def events(path: Path) -> list[str] | None:
        try:
            store = SQLiteStore(path, vfs="unix")
        except HeedError:
            return None
        try:
            return sorted(repr(event) for event in store.scan_events())
        except (HeedError, ValueError, TypeError):
            return None
        finally:
            asyncio.run(store.close())

    path = data / "heed.db"
    right, wrong = events(path), 0
    original = path.read_bytes()
    for _ in range(30):
        content = bytearray(original)
        content[rng.randrange(4096, len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        found = events(path)
        wrong += found is not None and found != right
    return wrong
