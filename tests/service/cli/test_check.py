"""`heed check`: findings, exit codes, salvage, and the acceptance of a loss."""

import shutil
from pathlib import Path

from service.runtime.data_layout import EMBEDDINGS_FILE, STORE_FILE
from tests.support.command_line import Heed, counts
from tests.support.tiny import World


def test_check_finds_what_is_damaged(world: World, heed: Heed, tmp_path: Path) -> None:
    """An intact data directory passes; damage to a store or a model is named, with exit code 1."""
    data = world.copy(tmp_path / "data")
    data.chmod(0o755)
    said = heed("check", "--full", "--data", data)
    assert said.code == 0
    assert "every file matches its manifest" in said.out
    assert f"other users may read {data}" in said.out
    assert "problem" not in said.out
    if (data / EMBEDDINGS_FILE).exists():
        (data / EMBEDDINGS_FILE).write_bytes(b"no embeddings")
        assert "texts are encoded again" in heed("check", "--data", data).out
    model = next(file for file in (data / "models" / "versions" / world.first).iterdir())
    model.chmod(0o600)
    model.write_bytes(model.read_bytes()[:-1])
    said = heed("check", "--data", data)
    assert said.code == 1
    assert model.name in said.out
    assert "heed check --salvage" in said.err


def test_a_damaged_store_is_salvaged(world: World, heed: Heed, tmp_path: Path) -> None:
    data, store = world.copy(tmp_path / "data"), tmp_path / "data" / STORE_FILE
    before = counts(data)
    content = store.read_bytes()
    store.write_bytes(content[:-2000] + b"damage" + content[-1994:])
    said = heed("check", "--data", data)
    assert said.code == 1
    assert str(store) in said.out
    said = heed("check", "--data", data, "--salvage", tmp_path / "new.db")
    assert said.code == 0
    assert f"users and {before['items']} items copied" in said.out
    shutil.move(tmp_path / "new.db", store)
    Path(f"{store}-mark").unlink()
    assert heed("check", "--full", "--data", data).code == 0
    assert counts(data)["users"] == before["users"]


def test_a_loss_is_accepted(world: World, heed: Heed, tmp_path: Path) -> None:
    data = world.copy(tmp_path / "data")
    (data / STORE_FILE).unlink()
    for command in (["check"], ["export", "items", tmp_path / "items.jsonl"]):
        said = heed(*command, "--data", data)
        assert said.code == 1
        assert "--accept-loss" in said.out + said.err
    assert heed("check", "--accept-loss", "--data", data).code == 0
    assert counts(data) == {"users": 0, "items": 0, "events": 0}
