"""Modes of files: files that Heed writes are private to its user, whatever the umask."""

from __future__ import annotations

import os
import signal
import stat
import time
from functools import partial
from pathlib import Path

import httpx

from tests.support.heed_process import PATIENCE, HeedProcess

PORT = 8232


def walk(folder: Path) -> dict[str, int]:
    """The modes of a folder and of all entries in it, by path."""
    return {
        str(path.relative_to(folder.parent)): stat.S_IMODE(path.lstat().st_mode)
        for path in (folder, *folder.rglob("*"))
    }


def open_to_others(folder: Path) -> dict[str, str]:
    """The entries that another user of the machine may read, write or enter."""
    return {path: oct(mode) for path, mode in walk(folder).items() if mode & 0o077}


def write_shop(folder: Path) -> None:
    """A catalogue and a log, as a shop exports them, and one bad row."""
    items = ["item_id,title,description"]
    items += [f"i{n},Item {n},Words about the thing of number {n}" for n in range(120)]
    (folder / "items.csv").write_text("\n".join(items) + "\n")
    events = ["user_id,item_id,timestamp"]
    events += [
        f"u{user},i{(user + step) % 120},2026-01-{1 + step:02d}T10:00:00Z"
        for user in range(40)
        for step in range(12)
    ]
    (folder / "events.csv").write_text("\n".join([*events, "u1,i1,never"]) + "\n")


def test_whatever_heed_writes_is_its_owners(tmp_path: Path) -> None:
    """A data directory after imports, trainings, workers, keys, backups, copies and exports."""
    shop, box = tmp_path / "shop", tmp_path / "box"
    shop.mkdir()
    write_shop(shop)
    box.mkdir(mode=0o700)
    data, out = box / "data", box / "out"
    out.mkdir(mode=0o700)
    environment = {"HEED_DATA": str(data), "HEED_METRICS_KEY_FILE": str(out / "metrics.key")}

    def run(*arguments: object) -> HeedProcess:
        return HeedProcess(
            *arguments,
            log=tmp_path / "log",
            environment=environment,
            prepare=partial(os.umask, 0o000),
        )

    def done(*arguments: object) -> None:
        process = run(*arguments)
        assert process.wait() == 0, f"{arguments}: {process.log()} {process.out()}"

    done("import", "items", shop / "items.csv")
    mapping = ("--save-mapping", out / "mapping.toml", "--skip-bad")
    done("import", "events", shop / "events.csv", *mapping, "--rejects", out / "rejected.csv")
    done("namespaces", "create", "second")
    done("import", "items", "--namespace", "second", shop / "items.csv")
    done("tune-search")
    serving = run("serve", "--port", PORT, "--workers", "2", "--first-key")
    url = f"http://127.0.0.1:{PORT}"
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        key = {"Authorization": f"Bearer {(data / 'admin.key').read_text().strip()}"}
        with httpx.Client(base_url=url, headers=key, timeout=PATIENCE) as client:
            event = {"user_id": "u1", "item_id": "i2", "type": "view"}
            assert client.post("/v1/events", json={"events": [event]}).status_code < 300
            assert client.post("/v1/recommend", json={"user_id": "u1"}).status_code == 200
            job = client.post(
                "/v1/models/train", json={"options": {"preset": "quick", "epochs": 1}}
            )
            assert job.status_code < 300, job.text
            path = f"/v1/jobs/{job.json()['job_id']}"
            while client.get(path).json()["state"] in {"queued", "running"}:
                time.sleep(0.2)
            assert client.get(path).json()["state"] == "succeeded"
        found = open_to_others(box)
        assert found.pop("box/out/metrics.key") == "0o640"  # for the group of Prometheus
        assert found == {}
        done("backup", out / "deep" / "backup")
    finally:
        serving.send(signal.SIGTERM)
        serving.wait()
    done("keys", "create", "--name", "reader", "--scope", "read")
    done("restore", out / "deep" / "backup", "--data", box / "restored")
    done("copy", "--from", data, "--to", out / "copy", "--all-namespaces", "--json", out / "c.json")
    done("export", "events", out / "events.jsonl")
    done("export", "users", out / "users.jsonl.gz")
    done("recommend-all", "--out", out / "lists.csv")
    done("check", "--salvage", out / "salvaged.db")
    done("forgotten", "list", "--json", out / "forgotten.json")
    found = open_to_others(box)
    del found["box/out/metrics.key"]
    assert found == {}
    assert len(walk(data)) > 30
