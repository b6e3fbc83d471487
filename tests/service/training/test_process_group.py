"""Data-parallel training in real processes, compared with a single process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.compute.device import Processes
from models.data.interactions import Interactions
from models.evaluation.baselines import popularity
from models.evaluation.full_ranking import evaluate
from models.evaluation.splits import leave_one_out
from models.training.fit import TrainingResult
from models.training.presets import Preset
from service.training import train_and_publish
from service.training.process_group import ProcessGroupError, process_count, process_group
from tests.support.small import cycle
from tests.support.training import QUICK, content

pytestmark = pytest.mark.verify

WORTHS = [[3.0, 0.0, 5.0], [0.0, 0.0, 0.0]]
# Nothing is left to chance, so that sharing a batch changes nothing but the order of sums.
SURE = replace(QUICK, epochs=3, attention_epochs=0, request_time_share=0.0, item_rows_share=0.0)
LOG = cycle(users=40, length=9, items=20)


def given(rank: int) -> list[Tensor]:
    """Return the tensors of a member: one large, two small."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=draw) for shape in ((300, 400), (7,), ())]


def exchange(members: Processes, folder: str) -> None:
    """Run every collective operation and save its results."""
    means = []
    for worth in WORTHS:
        tensors = given(members.index)
        total = members.all_reduce_mean(tensors, worth[members.index])
        means.append((tensors, total))
    agreed = members.broadcast(lambda: f"from {members.index}")
    summed = members.sum(np.array([members.index, 7])).tolist()
    ranked = evaluate(popularity(LOG), leave_one_out(LOG).test, batch_size=7, group=members)
    judged = (ranked.ranks.tolist(), ranked.hr, ranked.ndcg, ranked.coverage)
    torch.save((means, agreed, summed, judged), Path(folder) / f"{members.index}.pt")


def test_collective_operations_agree(tmp_path: Path) -> None:
    """All members have the weighted mean, sum, broadcast and metrics of the loop."""
    with process_group(3, exchange, str(tmp_path)) as members:
        exchange(members, str(tmp_path))
    told = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    brought = [given(rank) for rank in range(3)]
    for number, worth in enumerate(WORTHS):
        for place in range(3):
            expected = sum(
                w / max(sum(worth), 1) * tensors[place].double()
                for w, tensors in zip(worth, brought, strict=True)
            )
            of = [means[number][0][place] for means, *_ in told]
            np.testing.assert_allclose(of[0], expected, atol=1e-6)
            assert all(torch.equal(other, of[0]) for other in of[1:])
        assert {means[number][1] for means, *_ in told} == {sum(worth)}
    alone = evaluate(popularity(LOG), leave_one_out(LOG).test)
    for _, agreed, summed, judged in told:
        assert agreed == "from 0"
        assert summed == [0 + 1 + 2, 3 * 7]
        assert judged == (alone.ranks.tolist(), alone.hr, alone.ndcg, alone.coverage)


def preset(**config: Any) -> Preset:
    return Preset("quick", 16, 1, 0.0, 4, replace(SURE, **config))


def in_float32(members: Processes, *work: Any) -> TrainingResult:
    """Train as a group member, with float32 products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.training.losses.product_dtype", lambda device: torch.float32)
        return train_and_publish._fit(members, *work)


def trained(size: int, chosen: Preset, log: Interactions = LOG, **more: Any) -> TrainingResult:
    split = leave_one_out(log)
    every_event = split.test.history
    text = content(log.n_items)
    plan = chosen.plan(split.train, text, split.validation, every_event=every_event, seed=5)
    with process_group(size, in_float32, plan) as members:
        return in_float32(members, plan, *more.values())


def weights(fitted: TrainingResult) -> dict[str, NDArray[np.float32]]:
    return {name: part.detach().numpy() for name, part in fitted.model.named_parameters()}


def test_processes_train_the_same_model_as_one(tmp_path: Path) -> None:
    said: list[Any] = []
    alone = trained(1, preset())
    both = trained(2, preset(), told=lambda *told: said.append(told), checkpoint=tmp_path / "kept")
    assert len({(step.epoch, step.step) for *_, step in said}) == len(said) > 6
    for one, other in zip(alone.history, both.history, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert alone.validation is not None
    assert both.validation is not None
    assert both.validation.ndcg == pytest.approx(alone.validation.ndcg, abs=1e-3)
    for name, weight in weights(alone).items():
        np.testing.assert_allclose(weights(both)[name], weight, atol=2e-3, err_msg=name)
    again = trained(
        2, preset(), told=lambda *_: None, checkpoint=tmp_path / "kept"
    )  # from its last epoch
    for name, weight in weights(both).items():
        np.testing.assert_array_equal(weights(again)[name], weight)


def test_a_member_without_a_share_takes_part_all_the_same() -> None:
    """A member without rows in a batch does not block the others."""
    fitted = trained(2, preset(batch_tokens=8, epochs=1), cycle(users=6, length=7, items=8))
    assert all(np.isfinite(weight).all() for weight in weights(fitted).values())


def leave(members: Processes) -> None:
    """End before the work is done."""
    os._exit(7)


def wait_for(size: int) -> None:
    with process_group(size, leave) as members:
        members.all_reduce_mean([torch.zeros(5)], 1.0)


def test_a_helper_that_dies_ends_the_training_with_a_clear_error() -> None:
    """A process that exits during training raises ProcessGroupError with its exit code."""
    before = torch.get_num_threads()
    with pytest.raises(ProcessGroupError, match="exit code 7; if memory ran out"):
        wait_for(2)
    assert torch.get_num_threads() == before
    assert not torch.distributed.is_initialized()


class Leaves:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def test_a_helper_that_never_comes_is_not_waited_for() -> None:
    """A process that exits before it joins raises ProcessGroupError."""
    with (
        pytest.raises(ProcessGroupError, match="exit code 9"),
        process_group(2, exchange, Leaves()),
    ):
        raise AssertionError("nobody was there to begin with")


def test_process_count_grows_with_the_work() -> None:
    def found(cores: int, tokens: int, work: int, weights: int = 10**6) -> int:
        return process_count(cores, tokens=tokens, work=work, weights=weights)

    assert found(8, 6400, 1_000) == 1
    assert found(1, 6400, 10**8) == 1
    assert found(2, 1600, 2 * 10**6) == 2
    assert found(8, 1000, 10**8) == 2
    assert found(8, 6400, 10**8) == 8
    assert found(8, 6400, 10**8, 5 * 10**7) == 1
