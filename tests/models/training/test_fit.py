"""Training: convergence, stages, early stopping, progress and validation of arguments."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import models.training.fit
from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import Snapshot
from models.data.interactions import Interactions
from models.evaluation.baselines import item_transitions, popularity, repeats
from models.evaluation.full_ranking import RankingMetrics, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout, Split, leave_one_out
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.scoring import score
from models.recommender.artifact import TrainedModel
from models.recommender.recommender import Recommender
from models.training.fit import (
    Stage,
    StageTrainer,
    TrainingProgress,
    TrainingResult,
    fit,
    fit_statistics,
)
from models.training.log_profile import has_repeat_consumption
from models.training.presets import TrainConfig, TrainingPlan
from service.lab.protocols import next_basket
from tests.support.small import DAY, DIMENSION, SECOND, cycle, encode, entries, events_of
from tests.support.training import QUICK, content, tiny, train

pytestmark = pytest.mark.verify

# ---------------------------------------------------------------------------- what it learns

# People who all take the items in one order, and the last steps of others who do.
ROUND = cycle(users=40, length=9, items=24)
OTHERS = leave_one_out(cycle(users=40, length=9, items=24, seed=1)).test


def hit_rate(fitted: TrainingResult, case: Holdout, **more: Any) -> float:
    """Share of cases whose target comes first."""
    ranker = ModelRanker(fitted.model, content(case.history.n_items))
    return evaluate(ranker, case, k=1, **more).hr


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ({}, {}),
        ({"transitions_per_item": 0}, {}),
        ({"transitions_per_item": 0}, {"attention_epochs": 0}),
        ({"blocks": 0}, {"attention_batch_tokens": 40}),
        (
            {"blocks": 0, "transitions_per_item": 0, "tied_values": True},
            {"attention_batch_tokens": 40},
        ),
    ],
)
def test_training_learns_the_order_of_items(shape: dict[str, Any], config: dict[str, Any]) -> None:
    fitted = train(ROUND, replace(QUICK, **config), shape=tiny(24, **shape))
    assert hit_rate(fitted, OTHERS) > 0.97
    assert evaluate(popularity(ROUND), OTHERS, k=1).hr < 0.3


def test_the_horizon_is_the_longest_common_wait() -> None:
    """`max_request_gap` is a high quantile of the gaps between events of one user."""
    waits = np.full(2000, SECOND)
    waits[7] = 100 * DAY
    times = np.concatenate([np.cumsum(waits), [5 * DAY, 7 * DAY]])
    users = np.repeat([0, 1], [2000, 2])
    log = Interactions.from_columns(users, np.arange(2002) % 9, times, n_users=2, n_items=9)
    fitted = train(log, replace(QUICK, epochs=1, batch_tokens=2000, attention_epochs=0))
    assert SECOND <= int(fitted.model.statistics.max_request_gap) < 2 * DAY
    one = Interactions.from_columns([0, 0], [1, 2], [5, 8], n_users=1, n_items=9)
    assert int(train(one, replace(QUICK, epochs=1)).model.statistics.max_request_gap) == 3


def shop(users: int = 60, baskets: int = 12, seed: int = 0) -> Interactions:
    """Baskets a week apart: two of a user's three staples, and what is in fashion that month."""
    rng = np.random.default_rng(seed)
    events = []
    for user in range(users):
        staples = rng.permutation(30)[:3]
        for week in range(baskets):
            time = week * 7 * DAY + user * 3600 * SECOND
            events += [(user, int(item), time) for item in rng.permutation(staples)[:2]]
            events.append((user, 30 + week // 4, time))
    taken, items, times = zip(*events, strict=True)
    return Interactions.from_columns(
        taken, items, times, n_users=users, n_items=30 + baskets // 4 + 1
    )


def test_training_predicts_baskets_as_the_cases_do() -> None:
    task = next_basket(shop(), at=11 * 7 * DAY)
    assert task.validation is not None
    given = replace(QUICK, batch_tokens=640, basket_batch_tokens=160, learning_rate=3e-3)
    fitted = train(task.train, given, validation=task.validation)
    shape = fitted.model.config
    assert (shape.next_basket, shape.repeat_consumption) == (True, True)
    rankers = (
        ModelRanker(fitted.model, content(task.train.n_items)),
        item_transitions(task.train),
        repeats(task.train),
    )
    ours, *others = (evaluate(each, task.test, k=3, exclude_seen=False).ndcg for each in rankers)
    assert ours > 1.05 * max(others)
    alone = train(task.train, given)
    assert (alone.model.config.next_basket, alone.model.config.repeat_consumption) == (False, True)


def waiting(seed: int, users: int) -> Interactions:
    """A log in which only the gap before an event determines its item."""
    rng = np.random.default_rng(seed)
    length = 12
    kinds = rng.integers(0, 3, (users, length))
    waits = np.array([SECOND, 3600 * SECOND, 30 * DAY])[kinds]
    # Two items of each kind, which alternate, so that none of them is always the answer.
    taken = 2 * kinds + (np.arange(length) % 2)
    return Interactions.from_columns(
        np.repeat(np.arange(users), length),
        taken.ravel(),
        np.cumsum(waits, 1).ravel(),
        n_users=users,
        n_items=6,
    )


def test_request_time_is_used_where_it_determines_the_item() -> None:
    """With the request time the model finds the item, without it the model can only guess.

    One model serves both, for half of the windows were told.
    """
    split = leave_one_out(waiting(0, 80))
    shape = tiny(6, transitions_per_item=0)
    fitted = train(split.train, replace(QUICK, epochs=30), shape=shape)
    told = hit_rate(fitted, split.test, exclude_seen=False, use_target_time=True)
    untold = hit_rate(fitted, split.test, exclude_seen=False)
    assert told > 0.95
    assert untold < 0.6
    never = train(split.train, replace(QUICK, request_time_share=0.0), shape=shape)
    assert hit_rate(never, split.test, exclude_seen=False, use_target_time=True) < 0.8


def test_items_known_by_text_alone_are_ranked() -> None:
    themes = 4

    def about(names: list[str]) -> NDArray[np.float32]:
        theme = encode([f"theme {int(name[1:]) % themes}" for name in names])
        mixed = theme + np.float32(0.3) * encode(names)
        vectors: NDArray[np.float32] = mixed / np.linalg.norm(mixed, axis=1, keepdims=True)
        return vectors

    rng = np.random.default_rng(0)
    users, length, items = 48, 10, 40
    taken = rng.integers(0, items // themes, (users, length)) * themes
    taken += (np.arange(users) % themes)[:, None]
    log = Interactions.from_columns(
        np.repeat(np.arange(users), length), taken.ravel(), np.tile(np.arange(length), users),
        n_users=users, n_items=items,
    )  # fmt: skip
    names = [f"i{n}" for n in range(items)]
    config = replace(QUICK, epochs=8, id_dropout=0.3)
    fitted = fit(TrainingPlan(log, about(names), tiny(items), config))
    made = TrainedModel(fitted.model, tuple(names), log.item_counts(), "fake", {})
    fields = {f"title {n}": f"i{n}" for n in range(items + 8)}
    whole = Catalogue.empty(DIMENSION).updated(
        [replace(e, fields={"title": e.title}) for e in entries(items + 8)],
        [],
        lambda texts: about([fields[text] for text in texts]),
    )
    snapshot = Snapshot.build("v", made, whole, np.zeros(0, np.int64))
    new = np.arange(items, items + 8)
    right = 0
    for user in range(users):
        mine = events_of(log, user)
        types = mine.types.astype(np.int32)
        user_memory = build_memory(
            snapshot, UserHistory(mine.items, mine.timestamps, mine.weights, types), length
        )
        total = score(snapshot, user_memory, new).total.numpy()
        best = new[np.argsort(-total)[:2]]
        right += int((best % themes == user % themes).all())
    assert right > 0.9 * users


def with_news(users: int = 40, length: int = 8, items: int = 24) -> tuple[Split, Interactions]:
    """Users on a round of items, whose last but one event is always the last item; and the log."""
    rows = (np.arange(users)[:, None] + np.arange(length)) % (items - 1)
    rows[:, -2] = items - 1
    columns = np.repeat(np.arange(users), length), rows.ravel(), np.tile(np.arange(length), users)
    log = Interactions.from_columns(*columns, n_users=users, n_items=items)
    return leave_one_out(log), log


@pytest.mark.parametrize("blocks", [0, 1])
def test_final_epochs_learn_the_validation_cases(blocks: int) -> None:
    split, _ = with_news()
    every_event = split.test.history
    config = replace(QUICK, epochs=4, final_epochs=4, attention_batch_tokens=40)
    given: dict[str, Any] = {"shape": tiny(24, blocks=blocks), "validation": split.validation}
    fitted = train(split.train, config, every_event=every_event, **given)
    alone = train(split.train, config, **given)
    assert alone.model is alone.validated
    for name, weight in alone.model.state_dict().items():
        assert torch.equal(weight, fitted.validated.state_dict()[name]), name
    assert fitted.validation is not None
    assert alone.validation is not None
    assert fitted.validation.ndcg == alone.validation.ndcg < 0.2
    ranked = ModelRanker(fitted.model, content(24))
    assert evaluate(ranked, split.validation, k=8).hr > 0.95
    known = ModelRanker(fitted.validated, content(24))
    assert evaluate(known, split.validation, k=8).hr < 0.1
    counted = Recommender(fitted.model.config)
    fit_statistics(counted, every_event)
    found, wanted = fitted.model.statistics, counted.statistics
    assert torch.equal(found.transition_sums, wanted.transition_sums)
    assert len(fitted.history) == len(alone.history) + 4
    before, after = fitted.validated.state_dict(), fitted.model.state_dict()
    attention = ("item_norm", "cross_attention", "state_attention", "recency")
    for name in before:
        if name.startswith(attention):  # without an encoder nothing could read the new items
            assert torch.equal(before[name], after[name]) == (blocks > 0), name
        elif name.startswith(("id_embedding", "encoder")):
            assert not torch.equal(before[name], after[name]), name


def test_the_targets_part_of_the_queries_is_trained_second() -> None:
    told: list[TrainingProgress] = []
    config = replace(QUICK, epochs=2, attention_epochs=1)
    without = train(ROUND, replace(config, attention_epochs=0))
    fitted = train(ROUND, config, progress=told.append)
    assert not without.model.cross_attention.w_q.weight.any()
    assert fitted.model.cross_attention.w_q.weight.any()
    assert without.model.prior.any()
    before, after = without.model.state_dict(), fitted.model.state_dict()
    for name, weight in before.items():
        attention = {"item_norm", "cross_attention", "state_attention", "recency"}
        learned = name.split(".")[0] in attention
        assert torch.equal(weight, after[name]) != learned, name
    assert {p.epochs for p in told} == {3}
    assert [record["epoch"] for record in fitted.history] == [1, 2, 3]
    assert [record["epoch"] for record in without.history] == [1, 2]
    assert all(weight.requires_grad for weight in fitted.model.parameters())


def test_attention_that_lowers_validation_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, _ = scripted(monkeypatch, [0.1, 0.5, 0.4, 0.3], epochs=2, attention_epochs=2)
    assert fitted.epoch == 2
    assert not fitted.model.cross_attention.w_q.weight.any()
    fitted, script = scripted(monkeypatch, [0.1, 0.5, 0.4, 0.6], epochs=2, attention_epochs=2)
    assert fitted.epoch == 4
    assert fitted.model.cross_attention.w_q.weight.any()
    # It began from the best epoch of the first stage, whose weights it holds still.
    for name in ("id_embedding.weight", "prior", "encoder.norm_out.weight"):
        assert torch.equal(script.weights[3][name], script.weights[1][name])


# ---------------------------------------------------------------------------- repeating


def test_training_leaves_global_generators_unchanged() -> None:
    log = cycle(users=6, length=4, items=10)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    columns = log.items.copy(), log.timestamps.copy(), log.weights.copy()
    train(log, replace(QUICK, epochs=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]  # noqa: NPY002
    for was, now in zip(columns, (log.items, log.timestamps, log.weights), strict=True):
        np.testing.assert_array_equal(was, now)


# ---------------------------------------------------------------------------- the optimiser


def trainer_of(
    log: Interactions, config: TrainConfig, **shape: Any
) -> tuple[StageTrainer, Recommender]:
    torch.manual_seed(0)
    model = Recommender(tiny(log.n_items, **shape))
    parts = list(model.children())
    stage = Stage("full", log, config.epochs, config.batch_tokens, parts, True, True)
    return StageTrainer(model, stage, config, (0,)), model


def distance(model: Recommender) -> tuple[Tensor, int]:
    """Loss with a gradient for every parameter."""
    return sum(((weight - 1) ** 2).sum() for weight in model.parameters()), 1  # type: ignore[return-value]


def test_ema_is_the_running_mean_of_the_weights() -> None:
    log = cycle(users=60, length=6, items=10)
    trainer, model = trainer_of(log, replace(QUICK, batch_tokens=10))
    mean = {name: weight.double() for name, weight in model.state_dict().items()}
    count = 0
    for count, *_ in trainer.epoch(1, lambda _: distance(model)):
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        length = math.sqrt(sum(float((each**2).sum()) for each in gradients))
        assert length == pytest.approx(1, rel=1e-3), "longer gradients are cut"
        decay = min(QUICK.ema_decay, count / (9 + count))
        for name, weight in model.named_parameters():
            mean[name] = decay * mean[name] + (1 - decay) * weight.detach().double()
    assert count > 20
    for name, weight in trainer.ema.state_dict().items():
        np.testing.assert_allclose(weight, mean[name], atol=1e-6)
    assert not trainer.ema.training


def test_reported_loss_is_the_mean_over_targets() -> None:
    trainer, model = trainer_of(cycle(users=60, length=6, items=10), QUICK)
    losses: list[float] = []
    targets: list[int] = []
    told: list[tuple[int, float]] = []
    steps = 0

    def loss_of(spans: NDArray[np.int64]) -> tuple[Tensor, int]:
        losses.append(float(len(losses)))
        targets.append(len(losses) ** 2)
        return 0 * distance(model)[0] + losses[-1], targets[-1]

    for number, of, mean in trainer.epoch(1, loss_of):
        told.append((number, mean))
        steps = of
    assert [number for number, _ in told] == list(range(1, steps + 1))
    for number, mean in told:
        assert mean == pytest.approx(np.average(losses[:number], weights=targets[:number]))


def test_the_rate_warms_up_and_falls_to_a_twentieth() -> None:
    trainer, _ = trainer_of(cycle(users=4, length=3, items=12), QUICK)
    trainer._steps, rates = 200, []
    for step in range(201):
        trainer._step = step
        rates.append(trainer._schedule())
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)], rel=0.02)
    assert rates[100] == pytest.approx(0.525, abs=1e-6)
    assert rates[200] == pytest.approx(0.05, abs=1e-6)
    assert rates[9:] == sorted(rates[9:], reverse=True)


# ---------------------------------------------------------------------------- choosing and telling


class Script:
    """Fake `evaluate` that returns given NDCGs and records the weights and users."""

    def __init__(self, ndcgs: list[float]) -> None:
        self.ndcgs = list(ndcgs)
        self.weights: list[dict[str, Tensor]] = []
        self.cases: list[NDArray[np.int32]] = []

    def __call__(
        self, ranker: ModelRanker, holdout: Holdout, *, exclude_seen: bool, **_: object
    ) -> RankingMetrics:
        assert exclude_seen == (not has_repeat_consumption(holdout.history))
        state = ranker._model.state_dict()
        self.weights.append({name: weight.clone() for name, weight in state.items()})
        self.cases.append(holdout.users)
        ndcg = self.ndcgs[len(self.weights) - 1]
        return RankingMetrics(10, ndcg, ndcg, ndcg, 1.0, len(holdout), np.zeros(0, np.int64))


def scripted(
    monkeypatch: pytest.MonkeyPatch,
    ndcgs: list[float],
    progress: Callable[[TrainingProgress], None] | None = None,
    **config: Any,
) -> tuple[TrainingResult, Script]:
    script = Script(ndcgs)
    monkeypatch.setattr(models.training.fit, "evaluate", script)
    split = leave_one_out(cycle(users=8, length=6, items=10))
    config = {"epochs": len(ndcgs), "patience": 2, "attention_epochs": 0} | config
    made = train(split.train, replace(QUICK, **config), validation=split.test, progress=progress)
    return made, script


def test_model_ends_with_the_best_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, script = scripted(monkeypatch, [0.1, 0.3, 0.2, 0.3, 0.9])
    assert (fitted.epoch, len(script.weights)) == (2, 4)
    assert fitted.validation is not None
    assert fitted.validation.ndcg == 0.3
    assert [record["ndcg"] for record in fitted.history] == [0.1, 0.3, 0.2, 0.3]
    assert [record["epoch"] for record in fitted.history] == [1, 2, 3, 4]
    for name, weight in fitted.model.state_dict().items():
        assert torch.equal(weight, script.weights[1][name])
    assert not torch.equal(
        script.weights[1]["id_embedding.weight"], script.weights[3]["id_embedding.weight"]
    )
    assert not fitted.model.training


def test_a_better_epoch_renews_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, script = scripted(monkeypatch, [0.5, 0.1, 0.6, 0.1, 0.7, 0.1])
    assert (fitted.epoch, len(script.weights)) == (5, 6)


def test_stopping_early_still_trains_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an early stop the second stage runs with its own patience, and counts on."""
    ndcgs = [0.5, 0.4, 0.3, 0.4, 0.3, 0.9]
    told: list[TrainingProgress] = []
    fitted, script = scripted(monkeypatch, ndcgs, told.append, epochs=8, attention_epochs=3)
    assert [record["epoch"] for record in fitted.history] == [1, 2, 3, 4, 5]
    assert list(dict.fromkeys((p.epoch, p.epochs) for p in told)) == [
        *[(1, 11), (2, 11), (3, 11)],
        *[(4, 6), (5, 6)],
    ]
    assert (fitted.epoch, len(script.weights)) == (1, 5)


def test_validation_may_be_rarer_than_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, Any] = {"epochs": 5, "validate_every": 2, "attention_epochs": 1}
    fitted, _ = scripted(monkeypatch, [0.1, 0.2, 0.3, 0.4], **config)
    looked = [("ndcg" in record) for record in fitted.history]
    assert looked == [False, True, False, True, True, True]
    assert fitted.epoch == 6


@pytest.mark.parametrize("empty", [False, True])
def test_without_validation_the_last_epoch_is_taken(empty: bool) -> None:
    log = cycle(users=6, length=4, items=10)
    cases = leave_one_out(log).test
    none = cases.where(np.zeros(len(cases), np.bool_)) if empty else None
    fitted = train(log, replace(QUICK, epochs=5, patience=1), validation=none)
    assert fitted.validation is None
    assert fitted.epoch == 6
    assert [record.keys() for record in fitted.history] == [{"epoch", "loss"}] * 6
    assert fitted.seconds > 0


@pytest.mark.parametrize("blocks", [0, 1])
def test_progress_is_reported_after_every_step(blocks: int) -> None:
    """Epochs and steps count from 1, and the latest validation is shown."""
    split = leave_one_out(cycle(users=20, length=8, items=10))
    told: list[TrainingProgress] = []
    config = replace(QUICK, epochs=3, attention_batch_tokens=30)
    fitted = train(split.train, config, validation=split.validation, progress=told.append,
                   shape=tiny(10, blocks=blocks))  # fmt: skip
    epochs = [1, 2, 3, 4] if blocks else [1, 2, 3]
    assert list(dict.fromkeys(p.epoch for p in told)) == epochs
    for epoch in epochs:
        mine = [p for p in told if p.epoch == epoch]
        assert [p.step for p in mine] == list(range(1, mine[0].steps + 1))
        assert len(mine) > 1
    assert {p.epochs for p in told} == {len(epochs)}
    assert all(math.isfinite(p.loss) and p.loss > 0 for p in told)
    assert [p.validation is None for p in told] == [p.epoch == 1 for p in told]
    assert [record["loss"] for record in fitted.history] == [
        [p.loss for p in told if p.epoch == epoch][-1] for epoch in epochs
    ]
    assert told[-1].loss < told[0].loss
    assert math.isnan(told[0].remaining)
    assert all(p.remaining >= 0 for p in told[1:])
    assert told[-1].remaining == 0


def weighted(weight: float) -> Interactions:
    log = cycle(users=3, length=3, items=10)
    return replace(log, weights=np.where(np.arange(len(log)) == 4, weight, 1).astype(np.float32))


PLAN = TrainingPlan(cycle(users=3, length=3, items=10), content(10), tiny(10), QUICK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": content(9)}, rf"content must be \[10, {DIMENSION}\]"),
        ({"content": np.full_like(content(10), np.nan)}, "content must be finite"),
        ({"model_config": tiny(11)}, "the model has 11 items, the log 10"),
        ({"every_event": cycle(users=3, length=3, items=11)}, "every_event has 11 items, the log"),
        ({"log": weighted(0.0)}, "weights must be greater than 0"),
        ({"log": weighted(-1.0)}, "weights must be greater than 0"),
        ({"log": cycle(users=5, length=1, items=10)}, "no user has two events"),
        ({"log": cycle(users=5, length=0, items=10)}, "no user has two events"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(replace(PLAN, **change))
