"""Commands of a user who may not use the data directory: a sentence, and no traceback."""

from __future__ import annotations

import logging.config  # noqa: F401 - before the user changes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import service.http.server  # noqa: F401
from tests.support.command_line import Heed
from tests.support.tiny import World

"".encode("utf-8-sig")  # its codec is imported when it is used first

NOBODY = 65534
COMMANDS = {
    "serve": ("serve", "--port", "8234"),
    "check": ("check",),
    "doctor": ("doctor", "--json"),
    "import": ("import", "items", "ITEMS"),
    "backup": ("backup", "TARGET"),
    "train": ("train",),
    "recommend-all": ("recommend-all", "--out", "TARGET"),
}


@contextmanager
def as_nobody() -> Iterator[None]:
    """Act as another user of the machine, where the tests are root's."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


@pytest.fixture
def data(world: World) -> Iterator[Path]:
    """A data directory that others may read, in a folder that they may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        data = world.copy(folder / "data")
        (folder / "items.csv").write_text("item_id,title\na,A\n")
        (folder / "out").mkdir()
        (folder / "out").chmod(0o777)
        yield data
        for path in (data, *data.rglob("*")):  # so that it can be removed
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(data)


@pytest.mark.parametrize("directory", [0o555, 0o700], ids=oct)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_of_another_user(
    data: Path, heed: Heed, monkeypatch: pytest.MonkeyPatch, command: str, directory: int
) -> None:
    """The files may be read only, or belong to another user than their directory."""
    places = {"ITEMS": data.parent / "items.csv", "TARGET": data.parent / "out" / "it.csv"}
    arguments = [str(places.get(each, each)) for each in COMMANDS[command]]
    mode = 0o444 if directory == 0o555 else 0o000
    heed(*COMMANDS["check"], "--data", data)  # imports what it needs, as this user
    heed(*COMMANDS["doctor"], "--data", data)
    for path in data.rglob("*"):
        path.chmod(directory if path.is_dir() else mode)
    data.chmod(directory)
    if os.geteuid() == 0 and directory == 0o700:
        os.chown(data, NOBODY, NOBODY)
    monkeypatch.setenv("HEED_LOG_FORMAT", "console")
    with as_nobody():
        said = heed(*arguments, "--data", data)
    assert said.code == 1, said.out + said.err
    assert "has no permission for" in said.out + said.err
    assert "chown" in said.out + said.err
    assert "Errno" not in said.out + said.err
