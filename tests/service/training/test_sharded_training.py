"""Training from a store by several processes, each of which reads the events of its own users."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from models.compute.device import Processes
from models.text.encoders import StaticEncoder
from models.training.log_profile import hold_out
from service.domain.errors import Invalid, ModelRejected
from service.domain.records import Event
from service.runtime.data_layout import CHECKPOINT_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.encoding import user_key
from service.stores.sqlite.store import SQLiteStore
from service.stores.values import LogColumns, Shard
from service.training import train_and_publish, training_corpus
from service.training.training_corpus import TrainingCorpus
from tests.support.shards import in_processes
from tests.support.tiny import NOON, QUICK, events, populate

pytestmark = pytest.mark.verify

ROOT = Path(__file__).parents[3]
FAST = replace(
    QUICK,
    train_config=replace(QUICK.train_config, epochs=2, attention_epochs=1, final_epochs=1),
)


class CountingStore(SQLiteStore):
    """A store that records whose events its scans have read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: dict[str, int] = {}  # events by user

    def scan(self, rows: int = 100_000, *, shard: Shard | None = None) -> Iterator[LogColumns]:
        for part in super().scan(rows, shard=shard):
            for user, count in zip(*np.unique(part.users, return_counts=True), strict=True):
                user_id = part.user_ids[user]
                self.read[user_id] = self.read.get(user_id, 0) + int(count)
            yield part

    def scan_events(self) -> Iterator[Event]:
        raise AssertionError("a training reads columns")


class Read(NamedTuple):
    """A corpus by names, and the number of events of each user that were read for it."""

    by_user: dict[str, int]
    items: dict[str, int]  # events of this process by item
    types: dict[str, int]  # likewise by type
    total_items: dict[str, int]
    names: tuple[tuple[str, ...], tuple[str, ...]]
    content: dict[str, NDArray[np.float32]]
    shard_events: tuple[int, ...]


def read(group: Processes, data: Path) -> tuple[TrainingCorpus, dict[str, int]]:
    """Read the corpus of a process; none but rank zero has an encoder of texts."""
    store = CountingStore(data / STORE_FILE)
    try:
        embeddings = EmbeddingCache(StaticEncoder())
        if not group.is_first:
            embeddings.encode = None  # type: ignore[method-assign, assignment]
        return training_corpus.read_store(store, embeddings, shards=group), store.read
    finally:
        asyncio.run(store.close())


def described(shards: Processes, data: Path) -> Read:
    """What a process has read."""
    corpus, by_user = read(shards, data)
    log = corpus.log
    types = np.bincount(log.types, minlength=len(corpus.types))
    return Read(
        by_user,
        dict(zip(corpus.item_ids, log.item_counts().tolist(), strict=True)),
        dict(zip(corpus.types, types.tolist(), strict=True)),
        dict(zip(corpus.item_ids, log.total_item_counts().tolist(), strict=True)),
        (corpus.item_ids, corpus.types),
        dict(zip(corpus.item_ids, corpus.content, strict=True)),
        corpus.shard_events,
    )


def total(parts: list[dict[str, int]]) -> dict[str, int]:
    """The sum of numbers by name."""
    found: dict[str, int] = {}
    for part in parts:
        for name, number in part.items():
            found[name] = found.get(name, 0) + number
    return found


def append(data: Path, more: list[Event]) -> None:
    """Add events to the store of a data directory."""
    store = SQLiteStore(data / STORE_FILE)
    asyncio.run(store.append(more))
    asyncio.run(store.close())


def test_no_process_reads_events_of_anothers_users(tmp_path: Path) -> None:
    populate(tmp_path)
    rare = [Event("u3", f"rare-{n}", type=("like", "dislike")[n % 2]) for n in range(3)]
    append(tmp_path, rare)
    sent = [*events(), *rare]
    found = in_processes(3, described, tmp_path)
    for index, own in enumerate(found):
        assert {user_key(user) % 3 for user in own.by_user} == {index}
        assert sum(own.by_user.values()) == own.shard_events[index] < len(sent)
    by_user = total([dict.fromkeys(own.by_user, 1) for own in found])
    assert set(by_user.values()) == {1}
    assert total([own.by_user for own in found]) == total([{each.user_id: 1} for each in sent])
    # The vocabulary is that of all, in one order, and the counts are those of the whole log.
    whole = described(Processes(), tmp_path)
    for own in found:
        assert own.names == found[0].names
        assert sorted(own.names[0]) == sorted(whole.names[0])
        assert sorted(own.names[1]) == sorted(whole.names[1]) == ["dislike", "like", "view"]
        assert own.total_items == whole.items
        assert own.shard_events == found[0].shard_events
        for item, vector in whole.content.items():
            np.testing.assert_array_equal(own.content[item], vector)
    assert total([own.items for own in found]) == whole.items
    assert total([own.types for own in found]) == whole.types


def refused(shards: Processes, folders: list[list[Path]]) -> list[str]:
    """Why the stores of some folders, one for each process, are not read."""
    found = []
    for each in folders:
        with pytest.raises((Invalid, ModelRejected)) as error:
            read(shards, each[shards.index])
        found.append(error.value.detail)
    return found


def test_processes_without_the_same_store_are_refused(tmp_path: Path) -> None:
    """A machine whose copy of the store is missing fails the training, and so do empty stores."""
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    populate(one)
    for missing, empty in in_processes(2, refused, [[one, two], [two, three]]):
        assert "the stores of the processes have 480, 0 events" in missing
        assert "there are no events to learn from" in empty


def trained_twice(shards: Processes, data: Path) -> tuple[list[NDArray[Any]], list[int], bool]:
    """Train twice with one checkpoint: the weights, the steps taken, and whether it is here."""
    corpus, _ = read(shards, data)
    history, cases = hold_out(corpus.log)
    checkpoint = data / f"checkpoint-{shards.index}"
    weights, steps = [], []
    for _ in range(2):
        stages: list[str] = []
        fitted = train_and_publish.fit_model(
            FAST.plan(history, corpus.content, cases, every_event=corpus.log, seed=1),
            lambda stage, *_, stages=stages: stages.append(stage),
            checkpoint,
        )
        weights.append(np.concatenate([p.detach().ravel() for p in fitted.model.parameters()]))
        steps.append(stages.count("training"))
    return weights, steps, checkpoint.exists()


def test_a_training_is_resumed_from_the_disk_of_one_process(tmp_path: Path) -> None:
    """The first process keeps the checkpoint, and all resume from it to the same weights."""
    populate(tmp_path)
    first, second = in_processes(2, trained_twice, tmp_path)
    assert (first[2], second[2]) == (True, False)
    assert first[1][0] > first[1][1] == 0  # the last epoch was done
    for weights in (first[0][1], *second[0]):
        np.testing.assert_array_equal(weights, first[0][0])


def manifest(data: Path) -> dict[str, Any]:
    """The manifest of the only model of a data directory."""
    (version,) = Registry(data / MODELS_FOLDER).versions()
    return dict(version.metadata or {})


def test_machines_with_disks_of_their_own_train_one_model(tmp_path: Path) -> None:
    heed = Path(sys.executable).parent / "heed"
    populate(tmp_path / "0")
    append(tmp_path / "0", [Event("late", f"cooking-0{n}", timestamp=NOON + n) for n in range(4)])
    for copy in ("1", "alone"):
        shutil.copytree(tmp_path / "0", tmp_path / copy)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = "train --epochs 6 --preset quick --data"
    ran = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "--no-python", "sh", "-c",
         f"exec {heed} {options} {tmp_path}/$RANK"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    alone = subprocess.run(
        [heed, *options.split(), tmp_path / "alone"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    assert Registry(tmp_path / "1" / MODELS_FOLDER).versions() == []
    assert not (tmp_path / "0" / CHECKPOINT_FILE).exists()
    both, one = manifest(tmp_path / "0"), manifest(tmp_path / "alone")
    assert ran.stdout.count("Training with the preset") == 1
    assert f"2 processes have read {both['shard_events'][0]:,} + " in ran.stdout
    assert sum(both["shard_events"]) == both["events"] == one["events"] == 484
    assert max(both["shard_events"]) < 0.7 * both["events"]
    assert both["metrics"]["cases"] == one["metrics"]["cases"]
    for name in ("popularity", "popularity of 7 days"):
        assert both["baselines"][name] == pytest.approx(one["baselines"][name], rel=1e-12)
    for name in ("EASE", "transition counts"):
        assert both["baselines"][name] == pytest.approx(one["baselines"][name], abs=0.03)
    assert both["metrics"]["ndcg"] == pytest.approx(one["metrics"]["ndcg"], abs=0.1)
