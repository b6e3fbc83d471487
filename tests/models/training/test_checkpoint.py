"""Checkpoints: resuming an interrupted training, and refusing other or damaged files."""

import hashlib
import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.data.interactions import Interactions
from models.evaluation.full_ranking import RankingMetrics
from models.evaluation.splits import Holdout, leave_one_out
from models.training.checkpoint import HEADER, Checkpoint, CheckpointError
from models.training.fit import TrainingProgress, TrainingResult, fit
from models.training.presets import TrainConfig, TrainingPlan
from tests.support.small import SECOND, cycle
from tests.support.training import QUICK, content, tiny

pytestmark = pytest.mark.verify

# Dropout, dropped ids, sampled negatives and times that are told or not: all that chance decides.
CHANCY = replace(
    QUICK, epochs=3, attention_epochs=2, id_dropout=0.3, full_softmax_items=10, sampled_negatives=6,
    validate_every=2, validation_users=9,
)  # fmt: skip
LOG = cycle(users=14, length=7, items=20)


def run(
    log: Interactions = LOG, config: TrainConfig = CHANCY, *, blocks: int = 1, seed: int = 3,
    validated: bool = True, cases: Holdout | None = None, **more: Any
) -> tuple[TrainingResult, list[bytes]]:  # fmt: skip
    """Train, and return the result with all saved checkpoints."""
    saved: list[bytes] = []
    split = leave_one_out(log)
    given = split.validation if validated and cases is None else cases
    shape = tiny(log.n_items, dropout=0.2, blocks=blocks)
    texts = more.pop("texts", content(log.n_items))
    plan = TrainingPlan(
        split.train,
        texts,
        shape,
        config,
        given,
        every_event=more.pop("every_event", None),
        seed=seed,
    )
    fitted = fit(plan, save=saved.append, **more)
    return fitted, saved


def same(one: RankingMetrics | None, other: RankingMetrics | None) -> bool:
    """Whether two evaluations gave the same figures and the same ranks."""
    if one is None or other is None:
        return one is other
    numbers = [getattr(one, name) == getattr(other, name) for name in RankingMetrics.__slots__]
    return bool(np.all([np.all(equal) for equal in numbers]))


def assert_same(one: TrainingResult, other: TrainingResult) -> None:
    """Assert that two training results are equal bit for bit, but for their duration."""
    weights, others = one.model.state_dict(), other.model.state_dict()
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.numpy().tobytes() == others[name].numpy().tobytes(), name
    assert one.history == other.history
    assert one.epoch == other.epoch
    assert same(one.validation, other.validation)
    assert one.model.training == other.model.training
    assert all(weight.requires_grad for weight in other.model.parameters())


@pytest.mark.parametrize(
    ("blocks", "validated", "config"),
    [
        (1, True, {}),
        (1, False, {}),
        (1, True, {"attention_epochs": 0}),
        (0, True, {}),
        # It stops early in the first stage and in the second: nothing it learns is better.
        (1, True, {"learning_rate": 0.0, "patience": 1, "validate_every": 1}),
    ],
)
def test_resumed_training_equals_an_uninterrupted_one(
    blocks: int, validated: bool, config: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"blocks": blocks, "validated": validated}
    given["config"] = replace(CHANCY, **config)
    whole, saved = run(**given)
    assert len(saved) == len(whole.history) >= 3
    for epoch, data in enumerate(saved, 1):
        told: list[TrainingProgress] = []
        resumed, rest = run(**given, resume=data, progress=told.append)
        assert_same(whole, resumed)
        assert len(rest) == len(saved) - epoch
        assert [Checkpoint.from_bytes(each).epoch for each in rest] == [
            Checkpoint.from_bytes(each).epoch for each in saved[epoch:]
        ]
        # What was done is not done again.
        done = {record["epoch"] for record in whole.history[:epoch]}
        assert not done & {float(progress.epoch) for progress in told}


def test_resumed_progress_reports_the_latest_validation_from_the_first_step() -> None:
    _, saved = run()
    told: list[TrainingProgress] = []
    run(resume=saved[1], progress=told.append)
    assert told[0].epoch == 3
    assert told[0].validation is not None
    assert same(told[0].validation, Checkpoint.from_bytes(saved[1]).latest)


# ---------------------------------------------------------------------------- another training


def other_logs() -> dict[str, Interactions]:
    """The same log but for one column."""
    items, times, weights = LOG.items.copy(), LOG.timestamps.copy(), LOG.weights.copy()
    types = LOG.types.copy()
    items[4], times[1], weights[3], types[2] = (items[4] + 9) % 20, times[1] + SECOND // 2, 2, 1
    one_more = Interactions.from_columns(
        np.append(LOG.users, 13), np.append(LOG.items, 3), np.append(LOG.timestamps, 99 * SECOND),
        n_users=14, n_items=20,
    )  # fmt: skip
    return {
        "items": replace(LOG, items=items),
        "times": replace(LOG, timestamps=times),
        "weights": replace(LOG, weights=weights),
        "types": replace(LOG, types=types),
        "one more event": one_more,
        "fewer users": cycle(users=13, length=7, items=20),
    }


def fewer_cases() -> Holdout:
    cases = leave_one_out(LOG).validation
    return cases.where(np.arange(len(cases)) != 5)


@pytest.mark.parametrize(
    "what",
    [
        *({"log": log} for log in other_logs().values()),
        {"seed": 4},
        {"blocks": 2},
        {"validated": False},
        {"cases": fewer_cases()},
        {"texts": 2 * content(20)},
        {"config": replace(CHANCY, epochs=4)},
        {"config": replace(CHANCY, learning_rate=2e-2)},
        {"config": replace(CHANCY, batch_tokens=81)},
        {"config": replace(CHANCY, patience=9)},
    ],
)
def test_a_checkpoint_of_another_training_is_refused(saved: bytes, what: dict[str, Any]) -> None:
    """Any column of the log, the cases, texts, shape, seed and settings are of a training."""
    with pytest.raises(CheckpointError, match="of another training"):
        run(**what, resume=saved)


# ---------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def saved() -> bytes:
    """A checkpoint from the middle of a training."""
    return run()[1][1]


def cannot_resume(data: bytes) -> str:
    """Return the message with which resuming from these bytes is refused."""
    with pytest.raises(CheckpointError) as refused:
        run(resume=data)
    return str(refused.value)


def test_every_damaged_byte_is_noticed(saved: bytes) -> None:
    """A flipped bit in the header, the archive or the tensors is detected."""
    places = np.linspace(0, len(saved) - 1, 150).astype(int)
    for place in [*range(60), *places.tolist()]:
        damaged = bytearray(saved)
        damaged[place] ^= 1
        with pytest.raises(CheckpointError):
            Checkpoint.from_bytes(bytes(damaged))


def test_a_truncated_file_is_noticed(saved: bytes) -> None:
    for length in [0, 1, 15, 16, 40, 48, 49, len(saved) // 2, len(saved) - 1]:
        with pytest.raises(CheckpointError):
            Checkpoint.from_bytes(saved[:length])
    with pytest.raises(CheckpointError):
        Checkpoint.from_bytes(saved + b"\0")


class Bomb:
    """Object whose unpickling runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def sealed(body: bytes) -> bytes:
    """Return the body with a valid checkpoint header and digest."""
    return HEADER + hashlib.sha256(body).digest() + body


def archived(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_reading_runs_no_code(tmp_path: Path) -> None:
    """A pickle in place of a checkpoint is refused and not executed."""
    path = tmp_path / "made"
    for body in (archived({"epoch": Bomb(path)}), pickle.dumps(Bomb(path)), archived(Bomb(path))):
        assert "cannot be read" in cannot_resume(sealed(body))
        assert "no checkpoint" in cannot_resume(body)
    assert not path.exists()
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists(), "the bomb was to be a real one"


def test_what_is_foreign_is_refused(saved: bytes) -> None:
    """Other archives, and checkpoints of another version, are refused."""
    for foreign in (b"", b"{}", b"PK\3\4", archived({}), archived([1, 2]), archived(None)):
        assert "no checkpoint" in cannot_resume(foreign)
        assert "cannot be read" in cannot_resume(sealed(foreign))
    newer = HEADER.replace(b"4", b"5") + saved[len(HEADER) :]
    assert "another version" in cannot_resume(newer)
