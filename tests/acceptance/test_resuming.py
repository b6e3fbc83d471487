"""SIGKILL of a real `heed train`: the next run resumes and publishes the same model."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from models.recommender.artifact import WEIGHTS_FILE
from models.training.checkpoint import Checkpoint
from service.domain.records import Event
from service.runtime.data_layout import CHECKPOINT_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.stores.sqlite.store import SQLiteStore
from tests.support.heed_process import PATIENCE, HeedProcess
from tests.support.tiny import NOON, World, item_id

_EPOCH = re.compile(r"epoch (\d+)/(\d+)")


def training(data: Path) -> HeedProcess:
    """Start `heed train` with a fixed seed and number of epochs, on one thread."""
    arguments = ("train", "--data", data, "--epochs", 8, "--seed", 4)
    log = data.with_name(f"{data.name}-{time.monotonic_ns()}.log")
    return HeedProcess(*arguments, log=log, environment={"OMP_NUM_THREADS": "1"})


def trained(data: Path) -> tuple[list[int], str, str]:
    """Train to the end; return the reported epochs, stdout and stderr."""
    process = training(data)
    assert process.wait() == 0, process.log()
    out = process.out()
    assert {epochs for _, epochs in _EPOCH.findall(out)} == {"8"}
    return [int(epoch) for epoch, _ in _EPOCH.findall(out)], out, process.log()


def weights(data: Path) -> bytes:
    """Return the weights file of the only published version."""
    registry = Registry(data / MODELS_FOLDER)
    (version,) = registry.versions()
    assert registry.current() == version.version
    return bytes(registry.load(version.version)[WEIGHTS_FILE])


@pytest.fixture(scope="module")
def killed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small world, in which a training was killed after its first checkpoint."""
    data = world.copy(tmp_path_factory.mktemp("killed") / "data", trained=False)
    process = training(data)
    end = time.monotonic() + PATIENCE
    while not (data / CHECKPOINT_FILE).exists():
        assert process.is_alive, process.log()
        assert time.monotonic() < end, "there was no checkpoint"
        time.sleep(0.001)
    process.send(signal.SIGKILL)
    assert process.wait() < 0, "it ended before it was killed"
    assert Registry(data / MODELS_FOLDER).versions() == []
    return data


def test_killed_training_resumes_from_its_checkpoint(
    killed: Path, world: World, tmp_path: Path
) -> None:
    """A restarted training repeats no epoch and publishes the same weights, bit for bit."""
    data = tmp_path / "data"
    shutil.copytree(killed, data)
    done = len(Checkpoint.from_bytes((data / CHECKPOINT_FILE).read_bytes()).history)
    epochs, out, err = trained(data)
    assert "resuming from the checkpoint" in out
    assert err == ""
    assert epochs[0] == done + 1
    assert epochs == sorted(set(epochs))
    assert not (data / CHECKPOINT_FILE).exists()

    other = world.copy(tmp_path / "other", trained=False)
    epochs, out, _ = trained(other)
    assert "resuming" not in out
    assert epochs[0] == 1
    assert weights(data) == weights(other)


def test_checkpoint_of_other_events_is_ignored(killed: Path, tmp_path: Path) -> None:
    """A checkpoint of another log is ignored with a warning, and training starts at epoch 1."""
    data = tmp_path / "data"
    shutil.copytree(killed, data)

    async def happen() -> None:
        store = SQLiteStore(data / STORE_FILE)
        await store.append([Event("u0", item_id(0, 3), "late", timestamp=NOON)])
        await store.close()

    asyncio.run(happen())
    epochs, out, err = trained(data)
    assert err.count("training starts from the beginning") == 1
    assert "training starts from the beginning: the checkpoint is of another training" in err
    assert "resuming" not in out
    assert epochs[0] == 1
    assert weights(data)
    assert not (data / CHECKPOINT_FILE).exists()
