"""Training on shards of a log in two processes, beside training on the whole log in one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import Interactions
from models.training.checkpoint import Checkpoint, CheckpointError
from models.training.fit import fit
from models.training.log_profile import hold_out
from models.training.presets import TrainConfig, TrainingPlan
from tests.support.shards import in_processes, shard_of
from tests.support.small import DAY
from tests.support.training import QUICK, content, tiny

pytestmark = pytest.mark.verify

ITEMS = 24
# Nothing is drawn, and all windows are one batch: the order of sums alone is another.
SURE = replace(
    QUICK,
    epochs=4,
    batch_tokens=100_000,
    attention_epochs=0,
    request_time_share=0.0,
    item_rows_share=0.0,
)
DRAWN = replace(QUICK, epochs=8, id_dropout=0.1)


def walks(seed: int, *, users: int, uneven: bool = False) -> Interactions:
    """Users who mostly take the next item, of differing weight, with dislikes and repeats.

    Uneven: those with an odd number have an event or none.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 14, users)
    if uneven:
        lengths[1::2] = rng.integers(0, 2, len(lengths[1::2]))
    events = int(lengths.sum())
    starts = np.repeat(rng.integers(0, ITEMS, users), lengths)
    nth = np.concatenate([np.arange(length) for length in lengths])
    strays = rng.random(events) < 0.15
    return Interactions.from_columns(
        np.repeat(np.arange(users), lengths),
        np.where(strays, rng.integers(0, ITEMS, events), (starts + nth) % ITEMS),
        nth * DAY // 2 + rng.integers(0, DAY // 4, events),
        rng.uniform(0.5, 3, events),
        (rng.random(events) < 0.05).astype(np.int16),
        n_users=users,
        n_items=ITEMS,
        dislike_type=1,
    )


class Fitted(NamedTuple):
    """A training as plain values."""

    losses: list[float]
    validation: tuple[float, float, int]  # HR, NDCG and cases
    held_out: tuple[float, ...]
    weights: dict[str, NDArray[Any]]  # parameters and statistics
    saved: list[bytes]
    targets: int  # events of this shard


def trained(
    shards: Processes,
    log: Interactions,
    config: TrainConfig,
    resume: bytes | None = None,
) -> Fitted:
    """Train on a shard of the log, with float32 products."""
    saved: list[bytes] = []
    own = shard_of(log, shards)
    history, cases = hold_out(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.training.losses.product_dtype", lambda device: torch.float32)
        patch.setattr("models.evaluation.model_ranker.product_dtype", lambda device: torch.float32)
        done = fit(
            TrainingPlan(
                history, content(ITEMS), tiny(ITEMS), config, cases, every_event=own, seed=3
            ),
            save=saved.append,
            resume=resume,
            group=shards,
        )
    assert done.validation is not None
    metrics = done.validation
    return Fitted(
        [epoch["loss"] for epoch in done.history],
        (metrics.hr, metrics.ndcg, metrics.n_cases),
        (*done.weights.offsets, done.weights.similarity),
        {name: part.numpy() for name, part in done.model.state_dict().items()},
        saved,
        len(own),
    )


LOGS = {
    "even": walks(0, users=41),
    "uneven": walks(1, users=60, uneven=True),
    "one user": walks(2, users=1),  # nobody is in the second shard
}


def every(shards: Processes) -> dict[str, Fitted]:
    found = {f"sure, {name}": trained(shards, log, SURE) for name, log in LOGS.items()}
    return found | {"drawn, even": trained(shards, LOGS["even"], DRAWN)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Fitted]:
    """Trainings in one process."""
    return every(SINGLE_PROCESS)


@pytest.fixture(scope="module")
def together() -> list[dict[str, Fitted]]:
    """The same trainings in two processes."""
    return in_processes(2, every)


@pytest.mark.parametrize("name", LOGS)
def test_shards_train_the_model_of_one_process(
    name: str, alone: dict[str, Fitted], together: list[dict[str, Fitted]]
) -> None:
    """Where nothing is drawn, losses, metrics and weights are those of a single process."""
    expected = alone[f"sure, {name}"]
    for own in together:
        found = own[f"sure, {name}"]
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
        assert found.validation == pytest.approx(expected.validation, abs=1e-6)
        assert found.held_out == expected.held_out
        for part, weight in expected.weights.items():
            np.testing.assert_allclose(found.weights[part], weight, atol=2e-3, err_msg=part)
    shares = [own[f"sure, {name}"].targets for own in together]
    assert sum(shares) == expected.targets == len(LOGS[name])


def test_all_processes_end_with_one_model(together: list[dict[str, Fitted]]) -> None:
    """Weights and statistics are the same in both processes, bit by bit, and one saves them."""
    first, second = together
    for name, found in first.items():
        assert second[name].validation == found.validation
        for part, weight in found.weights.items():
            np.testing.assert_array_equal(second[name].weights[part], weight, f"{name}: {part}")
        assert second[name].saved == []
    assert len(first["drawn, even"].saved) == len(first["drawn, even"].losses)


def refused(shards: Processes, data: bytes) -> str:
    """The error with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as error:
        trained(shards, LOGS["even"], DRAWN, data)
    return str(error.value)


def test_a_checkpoint_of_another_division_is_refused(
    alone: dict[str, Fitted], together: list[dict[str, Fitted]]
) -> None:
    """One process does not resume the training of two, nor two the training of one."""
    runs = {
        Checkpoint.from_bytes(found["drawn, even"].saved[0]).run for found in (alone, together[0])
    }
    assert len(runs) == 2
    message = "the checkpoint is of another training: other events or settings"
    assert refused(SINGLE_PROCESS, together[0]["drawn, even"].saved[0]) == message
    data = alone["drawn, even"].saved[0]
    assert in_processes(2, refused, data) == [message] * 2


def test_a_shard_of_another_process_is_refused() -> None:
    log = shard_of(LOGS["even"], Processes(1, 2))
    with pytest.raises(ValueError, match="shard 1 of 2 is not that of"):
        fit(TrainingPlan(log, content(ITEMS), tiny(ITEMS), SURE))
