"""The command line: results and error messages of each command."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.recommender.artifact import WEIGHTS_FILE
from service.datasets.rows import to_json_lines
from service.domain.records import Event, Item, User
from service.runtime.data_layout import CHECKPOINT_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.stores.sqlite.store import SQLiteStore
from tests.support.command_line import Heed, counts
from tests.support.tiny import World, events, items

pytestmark = pytest.mark.verify

ROOT = Path(__file__).parents[3]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The small world as files to import."""
    (tmp_path / "items.jsonl").write_bytes(b"".join(to_json_lines(items())))
    with gzip.open(tmp_path / "events.jsonl.gz", "wb") as packed:
        packed.writelines(to_json_lines(events()))
    with (tmp_path / "events.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user_id", "item_id", "timestamp"])
        rows.writerows((e.user_id, e.item_id, (e.timestamp or 0) // 1000) for e in events())
    return tmp_path


# ------------------------------------------------------------------ data in and out


def test_importing_twice_changes_nothing(heed: Heed, files: Path) -> None:
    for name in ("events.jsonl.gz", "events.csv"):
        for stored, again in ((480, 0), (0, 480)):
            said = heed("import", "events", files / name)
            assert said.code == 0, said.err
            assert f"{stored} events stored, {again} were there already" in said.out
    for _ in range(2):
        said = heed("import", "items", files / "items.jsonl")
        assert (said.code, "60 items" in said.out) == (0, True)
    assert counts(files / "data") == {"users": 40, "items": 60, "events": 960}


def test_a_new_store_is_said_to_be_new(heed: Heed, tmp_path: Path) -> None:
    """A misspelt path is not read as a shop without items in silence."""
    export = ("export", "items", tmp_path / "items.jsonl", "--data", tmp_path / "dta")
    assert f"{tmp_path / 'dta'} has no store yet: a new one is empty" in heed(*export).err
    assert "no store" not in heed(*export).err


def test_full_export_reproduces_the_store(heed: Heed, tmp_path: Path) -> None:
    vector = np.linspace(-1, 1, 256, dtype=np.float32)
    people = [
        User("u1", {"country": "NL", "deep": {"ages": [7, 8.5, None]}}, ("space", "music-03")),
        User("u2"),  # a profile that says nothing is one nevertheless
        User("no events, naïve", {}, ("cooking",)),
    ]

    async def fill(store: SQLiteStore) -> None:
        await store.put_items([*items(), Item("own", embedding=vector, hidden=True)])
        await store.delete_item("music-14")
        await store.append(events())
        await store.append([Event("u1", "own", timestamp=1, weight=0.1, key=vector, value=-vector)])
        await store.append([Event("u1", "own", f"tie-{n}", "like", timestamp=1) for n in "ba"])
        for person in people:
            await store.put_user(person)
        await store.forget("u3")

    async def everything(store: SQLiteStore) -> dict[str, Any]:
        ids = sorted({event.user_id for event in store.scan_events()})
        pages = [await store.page(user_id, limit=1_000) for user_id in ids]
        return {
            "items": list(store.scan_items()),
            "histories": dict(zip(ids, pages, strict=True)),
            "users": list(store.scan_users()),
            "counts": await store.counts(),
        }

    def at(data: Path, work: Callable[[SQLiteStore], Any]) -> Any:
        async def do() -> Any:
            store = SQLiteStore(data / STORE_FILE)
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(do())

    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    at(source, fill)
    # Profiles come first and last, so that neither way round is a matter of order.
    for what in ("users", "items", "events", "users"):
        file = tmp_path / f"{what}.jsonl.xz"
        assert heed("export", what, file, "--data", source).code == 0
        said = heed("import", what, file, "--data", copy)
        assert said.code == 0, said.err
    before, after = at(source, everything), at(copy, everything)
    assert after == before
    assert after["counts"] == {"users": 40, "items": 60, "events": 480 - 12 + 3}
    assert after["users"] == sorted(people, key=lambda person: person.user_id)
    assert "u3" not in after["histories"]


def test_profiles_are_read_from_csv_and_put_together(heed: Heed, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text(
        "user_id,interests,attributes\n"
        "ann,space|music,\n"
        'bob,,"{""age"": 24}"\n'
        "cleo,,[]\n"
        "ann,cooking,\n"
    )
    said = heed("import", "users", path)
    assert said.code == 1
    assert "people.csv, line 4, attributes: must be an object" in said.err
    assert counts(tmp_path / "data")["users"] == 0
    said = heed("import", "users", path, "--skip-bad")
    assert (said.code, "2 profiles stored" in said.out) == (0, True)
    assert "skipped" in said.err
    assert "line 4" in said.err
    assert "2 users written" in heed("export", "users", tmp_path / "out.jsonl").out
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == [
        {"user_id": "ann", "interests": ["space", "music", "cooking"]},
        {"user_id": "bob", "attributes": {"age": 24}},
    ]


def test_vectors_of_the_wrong_length_are_refused_with_their_line(heed: Heed, files: Path) -> None:
    path = files / "vectors.jsonl"
    path.write_text('{"item_id": "a", "title": "x"}\n{"item_id": "b", "embedding": [1, 2, 3]}\n')
    said = heed("import", "items", path)
    assert said.code == 1
    assert "line 2, embedding: has 3 dimensions; 256 are allowed" in said.err
    for key in ("key", "value"):
        path.write_text(json.dumps({"user_id": "u", "item_id": "a", key: [1.0]}) + "\n")
        assert f"line 1, {key}: has 1 dimensions" in heed("import", "events", path).err


def test_dimension_setting_must_match_the_text_encoder(
    heed: Heed, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEED_EMBEDDING_DIM other than the text encoder's dimension is refused by each command."""
    path = files / "vectors.jsonl"
    path.write_text('{"item_id": "b", "embedding": [1, 2, 3]}\n')
    monkeypatch.setenv("HEED_EMBEDDING_DIM", "3")
    for command in (
        ("import", "items", path),
        ("import", "events", files / "events.csv"),
        ("serve", "--port", 0),
    ):
        said = heed(*command)
        assert said.code == 1
        assert "HEED_EMBEDDING_DIM is 3, but" in said.err
        assert "256" in said.err
    assert counts(files / "data")["items"] == 0
    monkeypatch.setenv("HEED_EMBEDDING_DIM", "256")
    assert heed("import", "items", files / "items.jsonl").code == 0


# ------------------------------------------------------------------ models


def test_versions_are_listed_and_chosen(heed: Heed, world: World, tmp_path: Path) -> None:
    assert "heed train" in heed("models", "list").out
    data = world.copy(tmp_path / "world")

    def current() -> list[str]:
        rows = heed("models", "list", "--data", data).out.splitlines()
        assert sum(world.first in row or world.second in row for row in rows) == 2
        return [v for v in (world.first, world.second) for row in rows if v in row and "*" in row]

    assert current() == [world.first]
    assert heed("models", "activate", world.second, "--data", data).code == 0
    assert current() == [world.second]
    for name in ("nothing", "../escape"):
        said = heed("models", "activate", name, "--data", data)
        assert said.code == 1
        assert name in said.err
    assert current() == [world.second]


def test_versions_have_the_figures_that_decided(heed: Heed, tmp_path: Path) -> None:
    """If items new to their user decided, `models list` has the figures of these."""
    registry = Registry(tmp_path / "data" / MODELS_FOLDER)
    every, new = {"ndcg": 0.3626, "hr": 0.51}, {"ndcg": 0.4301, "hr": 0.62}
    for version, is_new in (("a", True), ("b", False)):
        metadata = {
            "metrics": every,
            "new_items": {"metrics": new},
            "verdict": {"ndcg": 0.4220, "new_items": is_new},
        }
        registry.publish({"a": b"bytes"}, metadata, version=version)
    registry.publish({"a": b"bytes"}, {"metrics": every}, version="c")
    rows = heed("models", "list").out.splitlines()
    for version, ndcg, hr in (
        *(("a", "0.4220", "0.6200"), ("b", "0.4220", "0.5100")),
        ("c", "0.3626", "0.5100"),
    ):
        (row,) = [row for row in rows if f" {version} " in row]
        assert ndcg in row
        assert hr in row


def test_pruning_keeps_the_newest_and_the_current_version(heed: Heed, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "data" / MODELS_FOLDER)
    for age in range(1, 5):
        registry.publish({"a": b"bytes"}, {}, version=f"v{age}", activate=age == 2)

    def left() -> list[str]:
        return sorted(
            path.name for path in (tmp_path / "data" / MODELS_FOLDER / "versions").iterdir()
        )

    for keep, removed, stay in (
        (3, ["v1"], ["v2", "v3", "v4"]),
        (1, ["v3"], ["v2", "v4"]),
        (1, [], ["v2", "v4"]),
        (0, ["v4"], ["v2"]),
        (0, [], ["v2"]),
    ):
        said = heed("models", "prune", "--keep", keep)
        assert said.code == 0, said.err
        told = [f"{version} removed" for version in removed] or ["There was nothing to remove."]
        assert said.out.splitlines() == told
        assert left() == stay
    assert registry.current() == "v2"
    assert heed("models", "activate", "v4").code == 1
    for wrong in (("--keep", "-1"), ()):
        said = heed("models", "prune", *wrong)
        assert (said.code, "--keep" in said.err) == (2, True)


def test_training_says_its_progress_as_json(heed: Heed, world: World, tmp_path: Path) -> None:
    """Each line is a message: stage and step, loss and epoch; the last one is the result."""
    data = world.copy(tmp_path / "world", trained=False)
    said = heed("train", "--data", data, "--epochs", 3, "--seed", 5, "--json-progress")
    assert said.code == 0, said.err
    *progress, last = [json.loads(line) for line in said.out.splitlines()]
    version = last["result"]["version"]
    assert [m["stage"] for m in progress][:1] == ["reading events"]
    trained = [message for message in progress if message["stage"] == "training"]
    assert trained
    assert trained[-1]["step"] == trained[-1]["steps"]
    assert trained[-1]["epoch"] == trained[-1]["epochs"] == 3
    assert trained[-1]["loss"] > 0
    assert trained[-1]["eta_s"] == 0
    registry = Registry(data / MODELS_FOLDER)
    assert registry.current() == version

    said = heed("train", "--data", data, "--epochs", 2, "--no-activate")
    assert said.code == 0
    assert "Training with the preset quick (64 dimensions, 2 blocks, 2 epochs at most)" in said.out
    assert "popularity" in said.out
    assert registry.current() == version
    assert len(registry.versions()) == 2
    assert not (data / CHECKPOINT_FILE).exists()


def test_a_training_that_is_refused_says_why(heed: Heed) -> None:
    said = heed("train", "--json-progress")
    assert said.code == 1
    assert "no events" in json.loads(said.out.splitlines()[-1])["error"]
    said = heed("train")
    assert said.code == 1
    assert "error: there are no events to learn from" in said.err


def test_evaluate_compares_the_models(heed: Heed, world: World, tmp_path: Path) -> None:
    data = world.copy(tmp_path / "world", trained=False)
    out = tmp_path / "found.json"
    said = heed("evaluate", "--data", data, "--epochs", 3, "--preset", "quick", "--json", out)
    assert said.code == 0, said.err
    assert "40 users, 60 items" in " ".join(said.out.split())
    found: dict[str, Any] = json.loads(out.read_text())
    assert (found["users"], found["items"], found["cases"]) == (40, 60, 40)
    assert found["preset"] == "quick (64 dimensions, 2 blocks, 3 epochs at most)"
    names = ["popularity", "popularity of 7 days", "EASE", "transition counts"]
    assert list(found["models"]) == [*names, "heed", "heed without final epochs"]
    others = [*names, "heed without final epochs"]
    assert list(found["heed_over"]) == list(found["heed_over_at_time"]) == others
    assert (found["task"], found["date"]) == ("last event", None)
    assert "of 40 customers the next item is one of" in " ".join(said.out.split())
    for model in found["models"].values():
        (figures,) = model["test"]
        assert 0 <= figures["ndcg"] <= figures["hr"] <= 1
        assert min(model["seconds"]) >= 0
    (figures,) = found["models"]["heed"]["validation"]
    assert 0 <= figures["ndcg"] <= figures["hr"] <= 1
    assert Registry(data / MODELS_FOLDER).versions() == []  # it publishes nothing
    assert not (data / CHECKPOINT_FILE).exists()


def test_evaluate_by_global_time_with_several_seeds(
    heed: Heed, world: World, tmp_path: Path
) -> None:
    """`--protocol global-time` trains before its date, once for each seed, on the same cases."""
    data, out = world.copy(tmp_path / "world", trained=False), tmp_path / "found.json"
    options = ("--protocol", "global-time", "--epochs", 3, "--seeds", 2, "--json", out)
    said = heed("evaluate", "--data", data, *options, "--date", "2025-11-26")
    assert said.code == 0, said.err
    printed = " ".join(said.out.split())
    assert "trained before 2025-11-26T00:00:00Z" in printed
    assert "up to 1 day" in printed
    found: dict[str, Any] = json.loads(out.read_text())
    assert (found["task"], found["date"]) == ("global-time", "2025-11-26T00:00:00Z")
    assert {name: len(row["test"]) for name, row in found["models"].items()} == {
        "popularity": 1, "popularity of 7 days": 1, "EASE": 1, "transition counts": 1, "heed": 2,
        "heed without final epochs": 2,
    }  # fmt: skip
    assert [len(found["models"]["heed"][part]) for part in ("test_with_time", "seconds")] == [2, 2]
    whole, *_ = found["slices"]
    assert whole["slice"] == "all cases"
    assert 0 < whole["cases"] == found["cases"] <= 40


# ------------------------------------------------------------------ what cannot be done


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["import", "events", "missing[/b].csv"], 1, "missing[/b].csv is not a file"),
        (["import", "events", "{file}.txt"], 1, "column user_id: is required; there are none"),
        (["import", "events", "{file}.xlsx"], 1, "must end in one of .jsonl"),
        (["import", "events", "x.csv", "--timezone", "Moon"], 1, "--timezone must be such as"),
        (["import", "events", "x.csv", "--map", "user_id"], 1, "--map must be FIELD=COLUMN"),
        (["import", "events", "x.csv", "--rejects", "r.csv"], 1, "--rejects needs --skip-bad"),
        (["import", "events", "x.csv", "--negative", "skip"], 1, "--negative needs --weight-from"),
        (["import", "--undo", "7"], 1, "no import 7; see heed import --list"),
        (["import", "--data", "other", "items", "x.csv"], 2, "put --data behind the subcommand"),
        (["import", "pyvideo", "{file}.gz"], 1, "file.gz"),
        (["export", "items", "out.csv"], 1, "must end in .jsonl"),
        (["export", "items", "/nowhere/[/b].jsonl"], 1, "/nowhere/[/b].jsonl"),
        (["train", "--data", "{file}.txt/deeper"], 1, "file.txt"),
        (["train", "--epochs", "0"], 2, "--epochs"),
        (["train", "--preset", "slow"], 2, "--preset"),
        (["evaluate"], 1, "no events"),
        (["evaluate", "--date", "2024-05-01"], 1, "--date needs --protocol global-time"),
        (["evaluate", "--protocol", "global-time", "--date", "May"], 2, "must be a time such as"),
        (["serve", "--host", "0.0.0.0"], 1, "refusing to bind 0.0.0.0"),
        (["serve", "--port", "70000"], 1, "--port: must be less"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_invalid_arguments_are_reported(
    heed: Heed, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "file.txt").touch()
    said = heed(*(word.replace("{file}", str(tmp_path / "file")) for word in arguments))
    assert said.code == code
    assert words in " ".join(said.err.split())


@pytest.mark.parametrize("what", ["model", "store"])
def test_damage_refuses_to_serve_and_names_the_file(
    heed: Heed, world: World, tmp_path: Path, what: str
) -> None:
    data = world.copy(tmp_path / "data")
    paths = [data / STORE_FILE]
    if what == "model":  # of two versions, an intact one would be served
        folder = data / MODELS_FOLDER / "versions"
        paths = [folder / version / WEIGHTS_FILE for version in (world.first, world.second)]
    for path in paths:
        path.chmod(0o644)
        path.write_bytes(b"\0" * 4096 + path.read_bytes()[4096:])
    said = heed("serve", "--port", "0")
    assert said.code == 1
    assert paths[0].name in said.err


def test_help_names_every_command_without_loading_any_of_it(heed: Heed) -> None:
    said = heed("--help")
    for name in (
        "demo",
        "serve",
        "import",
        "train",
        "evaluate",
        "models",
        "namespaces",
        "export",
        "loadtest",
    ):
        assert name in said.out
    code = "import sys, service.cli; print({'torch', 'numpy', 'fastapi'} & sys.modules.keys())"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "set()"
