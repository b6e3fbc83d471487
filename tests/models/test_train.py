"""Training: its loss against a float64 loop, what it learns, and how it stops."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import models.train
from models.baselines import Popularity
from models.catalogue import Catalogue
from models.data import Interactions
from models.evaluate import Metrics, Ranker, evaluate
from models.recommender import Recommender, RecommenderConfig
from models.scoring import score
from models.snapshot import Snapshot
from models.splits import Holdout, leave_one_out
from models.train import Fitted, Progress, RecommenderRanker, TrainConfig, _Trainer, fit, for_size
from models.trained import Trained
from models.user_memory import Past, remember
from tests.models.ranker_contract import RankerContract
from tests.models.reference_model import ReferenceModel
from tests.models.small import (
    DAY,
    DIMENSION,
    SECOND,
    cycle,
    encode,
    entries,
    random_model,
)
from tests.models.small import snapshot as small_snapshot

# Everything trains in a second or two: small batches, long steps, a short memory of weights.
QUICK = TrainConfig(
    epochs=12,
    validate_every=1,
    learning_rate=1e-2,
    warmup=10,
    batch_tokens=80,
    attention_share=0.5,
    drop_id=0.0,
    average=0.9,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small models train faster on one, and the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(items: int, **more: Any) -> RecommenderConfig:
    shape: dict[str, Any] = {"dim": 16, "heads": 2, "blocks": 1, "window": 16, "dropout": 0.0}
    return RecommenderConfig(**{"items": items, "content": DIMENSION} | shape | more)


def content(items: int) -> NDArray[np.float32]:
    return encode([f"title {n}" for n in range(items)])


def train(log: Interactions, config: TrainConfig = QUICK, **more: Any) -> Fitted:
    shape = more.pop("shape", tiny(log.n_items))
    return fit(log, content(log.n_items), shape=shape, config=config, **more)


def drawn_log(seed: int, lengths: list[int], items: int) -> Interactions:
    """Users of these lengths, with times that repeat and weights around 1."""
    rng = np.random.default_rng(seed)
    events = sum(lengths)
    return Interactions.from_columns(
        np.repeat(np.arange(len(lengths)), lengths),
        rng.integers(0, items, events),
        np.sort(rng.choice([0, SECOND, 40 * SECOND, DAY, 3 * DAY], events)),
        rng.uniform(0.2, 3, events),
        n_users=len(lengths),
        n_items=items,
    )


# ---------------------------------------------------------------------------- what it learns


@pytest.fixture(scope="module")
def going_round() -> tuple[Fitted, Interactions]:
    """A model of people who all take the items in one order."""
    log = cycle(users=40, length=9, items=24)
    return train(leave_one_out(log).train), log


def test_it_learns_what_comes_next(going_round: tuple[Fitted, Interactions]) -> None:
    """An order that popularity cannot see is learned to near perfection."""
    fitted, log = going_round
    case = leave_one_out(log).test
    model = evaluate(RecommenderRanker(fitted.model, content(24)), case, k=1)
    popularity = evaluate(Popularity.fit(case.history), case, k=1)
    assert model.hr > 0.95
    assert popularity.hr < 0.3


def test_a_sampled_denominator_learns_the_same() -> None:
    """With a fraction of the catalogue in each softmax, beyond `full_softmax` items."""
    log = cycle(users=120, length=8, items=60)
    split = leave_one_out(log)
    config = replace(QUICK, epochs=16, full_softmax=10, negatives=20)
    fitted = train(split.train, config)
    assert evaluate(RecommenderRanker(fitted.model, content(60)), split.test, k=1).hr > 0.9


def test_more_negatives_than_items_are_all_of_them() -> None:
    """A small catalogue above a small `full_softmax` is no error."""
    config = replace(QUICK, epochs=1, full_softmax=5, negatives=4096)
    fitted = train(cycle(users=6, length=5, items=12), config)
    assert all(torch.isfinite(weight).all() for weight in fitted.model.state_dict().values())


def test_items_known_by_text_alone_are_ranked() -> None:
    """People stay with a theme; new items of it, without any event, come before other new ones."""
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
    config = replace(QUICK, epochs=8, drop_id=0.3)
    fitted = fit(log, about(names), shape=tiny(items), config=config)
    made = Trained(fitted.model, tuple(names), log.item_counts(), "fake", {})
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
        mine = log.user(user)
        user_memory = remember(snapshot, Past(mine.items, mine.timestamps, mine.weights), length)
        total = score(snapshot, user_memory, new).total.numpy()
        best = new[np.argsort(-total)[:2]]
        right += int((best % themes == user % themes).all())
    assert right > 0.9 * users


def test_without_an_encoder_the_attention_learns_alone() -> None:
    """blocks = 0: the order is learned by target attention with its recency biases."""
    log = cycle(users=40, length=9, items=24)
    split = leave_one_out(log)
    fitted = train(split.train, replace(QUICK, attention_share=1.0), shape=tiny(24, blocks=0))
    assert evaluate(RecommenderRanker(fitted.model, content(24)), split.test, k=1).hr > 0.9


# ---------------------------------------------------------------------------- repeating


def test_the_same_seed_gives_the_same_weights() -> None:
    """Bit for bit, with dropout, dropped ids and sampled negatives; another seed does not."""
    log = cycle(users=20, length=7, items=30)
    config = replace(QUICK, epochs=2, drop_id=0.2, full_softmax=10, negatives=10)
    shape = tiny(30, dropout=0.3)
    first, again, other = (
        train(log, config, shape=shape, seed=seed).model.state_dict() for seed in (5, 5, 6)
    )
    for name, weight in first.items():
        assert weight.numpy().tobytes() == again[name].numpy().tobytes()
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())


def test_training_leaves_the_callers_chance_alone() -> None:
    """Neither torch's nor numpy's global generator moves, and the log is not written to."""
    log = cycle(users=6, length=4, items=10)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    columns = log.items.copy(), log.timestamps.copy(), log.weights.copy()
    train(log, replace(QUICK, epochs=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]  # noqa: NPY002
    for was, now in zip(columns, (log.items, log.timestamps, log.weights), strict=True):
        np.testing.assert_array_equal(was, now)


# ---------------------------------------------------------------------------- the loss


def cross_entropy(scores: list[float], target: int, seen: set[int]) -> float:
    """-log softmax of the target among itself and what was not seen yet."""
    open_ = [s for item, s in enumerate(scores) if item == target or item not in seen]
    peak = max(open_)
    return peak + math.log(math.fsum(math.exp(s - peak) for s in open_)) - scores[target]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("request_time", [0.0, 1.0])
def test_the_loss_equals_the_loop(tied: bool, request_time: float) -> None:
    """Each target of a batch, from its own prefix, weights as log w, in float64 plain loops."""
    items, heads = 8, 3
    log = drawn_log(1, [6, 2, 4, 1], items)
    model = random_model(3, items=items, tied=tied)
    config = replace(QUICK, attention_share=1.0, request_time=request_time, sequence_loss=0.25)
    trainer = _Trainer(model, log, content(items), config, np.random.default_rng(0))
    spans = np.array([[0, 6], [6, 8], [8, 12]])
    with torch.inference_mode():
        loss, positions = trainer._loss(spans)

    reference = ReferenceModel(model, heads)
    vectors = [reference.vector(row, content(items)[row]) for row in range(items)]
    prior = model.prior.detach().double().tolist()
    whole, alone = [], []
    for begin, end in spans.tolist():
        rows, times = log.items[begin:end].tolist(), log.timestamps[begin:end].tolist()
        for t in range(1, end - begin):
            summary = reference.summary([vectors[r] for r in rows[:t]], times[:t])
            asked = times[t] if request_time else times[t - 1]
            sequence, total = [], []
            for item in range(items):
                alpha, gain = reference.attention(
                    vectors[item],
                    [vectors[r] for r in rows[:t]],
                    [vectors[r] for r in rows[:t]],
                    distances=list(range(t - 1, -1, -1)),
                    ages=[asked - time for time in times[:t]],
                    weights=log.weights[begin : begin + t].tolist(),
                )
                sequence.append(float(vectors[item] @ summary) + prior[item])
                total.append(sequence[-1] + float((alpha * gain).sum()))
            seen = set(rows[:t])
            whole.append(cross_entropy(total, rows[t], seen))
            alone.append(cross_entropy(sequence, rows[t], seen))
    assert positions == len(whole) == 9
    expected = 0.75 * np.mean(whole) + 0.25 * np.mean(alone)
    assert float(loss) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), items=st.integers(1, 6), length=st.integers(1, 7))
def test_seen_items_are_hidden_from_each_position(seed: int, items: int, length: int) -> None:
    """All that came up to a position, but not its target; `items` stands for no candidate."""
    rng = np.random.default_rng(seed)
    inputs, own = (torch.from_numpy(rng.integers(0, items + 1, (2, length))) for _ in range(2))
    hidden = _Trainer._seen(inputs, own, items)
    assert hidden.shape == (2, length, items)
    for row, place, item in np.ndindex(2, length, items):
        before = item in inputs[row, : place + 1].tolist()
        assert bool(hidden[row, place, item]) == (before and item != int(own[row, place]))


def sampler(items: int, negatives: int, seed: int = 0) -> _Trainer:
    log = cycle(users=4, length=3, items=items)
    config = replace(QUICK, full_softmax=10, negatives=negatives)
    generator = np.random.default_rng(seed)
    return _Trainer(random_model(0, items=items), log, content(items), config, generator)


@pytest.mark.parametrize("negatives", [3, 20, 40])
def test_the_sampled_partition_is_unbiased(negatives: int) -> None:
    """Its mean over many draws is the exact one, however few are drawn; a part has its weight."""
    items, draws = 40, 4000
    trainer = sampler(items, negatives)
    targets = torch.tensor([3, 7, 7, 30])
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=items) * 1.5)
    exact = float(logits.exp().sum())
    found = np.empty(draws)
    for draw in range(draws):
        chosen = trainer._candidates(targets)
        found[draw] = float((logits[chosen.rows] + chosen.correction).exp().sum())
    error = found.std() / math.sqrt(draws)
    assert found.mean() == pytest.approx(exact, abs=5 * error + 1e-4)


def test_candidates_hold_every_target_once() -> None:
    """Targets stand for themselves; negatives are distinct, no targets, and stand for the rest."""
    trainer = sampler(40, 15)
    targets = torch.tensor([3, 7, 7, 30])
    for _ in range(50):
        chosen = trainer._candidates(targets)
        rows = chosen.rows.tolist()
        assert len(set(rows)) == len(rows)
        weights = dict(zip(rows, chosen.correction.exp().tolist(), strict=True))
        assert [weights[item] for item in (3, 7, 30)] == [1, 1, 1]
        assert sum(weights.values()) == pytest.approx(40, abs=1e-3)


def test_where_every_item_is_a_target_none_is_drawn() -> None:
    """The positives are then the whole partition."""
    chosen = sampler(12, 5)._candidates(torch.arange(12))
    assert chosen.rows.tolist() == list(range(12))
    assert not chosen.correction.any()


def test_small_catalogues_are_softmaxed_whole() -> None:
    """Up to `full_softmax` items no one is drawn and nothing is corrected."""
    chosen = sampler(10, 3)._candidates(torch.tensor([2]))
    assert chosen.rows.tolist() == list(range(10))
    assert not chosen.correction.any()


def test_every_weight_learns() -> None:
    """After one batch no part of the model is without a gradient."""
    log = drawn_log(2, [9, 8, 7], 12)
    model = random_model(1)
    trainer = _Trainer(model, log, content(12), QUICK, np.random.default_rng(0))
    trainer._loss(np.array([[0, 9], [9, 17], [17, 24]]))[0].backward()  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert torch.isfinite(weight.grad).all(), name
        assert weight.grad.abs().sum() > 0, name


# ---------------------------------------------------------------------------- batches


@pytest.mark.parametrize("window", [1, 2, 7, 200])
def test_windows_tile_every_history(window: int) -> None:
    """Backwards from its end, none too long: every event but the first is a target, each epoch."""
    lengths = [1, 2, 3, 8, 9, 30, 0, 61]
    log = drawn_log(3, lengths, 12)
    model = Recommender(tiny(12, window=window))
    trainer = _Trainer(model, log, content(12), QUICK, np.random.default_rng(1))
    for _ in range(5):
        spans = trainer._windows()
        targets: dict[int, int] = {}
        for first, end in spans.tolist():
            assert 2 <= end - first <= window + 1
            assert log.users[first] == log.users[end - 1]
            for event in range(first + 1, end):
                targets[event] = targets.get(event, 0) + 1
        expected = [event for event in range(len(log)) if log.positions[event] > 0]
        assert sorted(targets) == expected
        assert {int(log.offsets[u + 1]) for u in (1, 2, 3, 4, 5, 7)} <= set(spans[:, 1].tolist())


def test_batches_hold_like_lengths_within_their_budget() -> None:
    """All windows, each once; padded positions within `batch_tokens`, or one window alone."""
    log = drawn_log(4, [2] * 30 + [9] * 20 + [40] * 5, 12)
    model = Recommender(tiny(12, window=50))
    trainer = _Trainer(model, log, content(12), QUICK, np.random.default_rng(1))
    batches = trainer._batches()
    spans = sorted(tuple(span) for batch in batches for span in batch.tolist())
    assert len(set(spans)) == len(spans) == 55
    for batch in batches:
        lengths = batch[:, 1] - batch[:, 0] - 1
        assert len(batch) == 1 or lengths.max() * len(batch) <= QUICK.batch_tokens
    spread = [np.ptp(batch[:, 1] - batch[:, 0]) for batch in batches]
    assert np.median(spread) <= 4


# ---------------------------------------------------------------------------- the optimiser


def test_what_is_served_is_the_running_mean() -> None:
    """Each step's weights, averaged by hand with the decay of that step."""
    log = cycle(users=60, length=6, items=10)
    trainer = _Trainer(Recommender(tiny(10)), log, content(10), QUICK, np.random.default_rng(0))
    mean: dict[str, Tensor] = {}
    for count, _ in enumerate(trainer.epoch()):
        now = {k: v.double() for k, v in trainer.model.state_dict().items()}
        decay = min(QUICK.average, (1 + count) / (10 + count)) if count else 0.0
        mean = {k: decay * mean.get(k, v) + (1 - decay) * v for k, v in now.items()}
    assert count > 0
    for name, weight in trainer.averaged().state_dict().items():
        np.testing.assert_allclose(weight, mean[name], atol=1e-6)


def test_the_rate_warms_up_and_falls_to_a_twentieth() -> None:
    """Linear over the warm-up, then half a cosine over all the steps."""
    trainer = sampler(12, 3)
    trainer.steps, rates = 200, []
    for step in range(201):
        trainer.step = step
        rates.append(trainer._schedule())
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)], rel=0.02)
    assert rates[100] == pytest.approx(0.525, abs=1e-6)
    assert rates[200] == pytest.approx(0.05, abs=1e-6)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_larger_logs_take_fewer_epochs() -> None:
    """The defaults up to 300,000 events; beyond, less work an event, never none."""
    assert for_size(100, 50) == TrainConfig()
    sizes = [for_size(events, 4_000) for events in (300_000, 10**6, 10**7, 10**9)]
    for less, more in pairwise(sizes):
        assert more.epochs <= less.epochs
        assert more.attention_share <= less.attention_share
    assert sizes[-1].epochs >= 1
    assert sizes[-1].attention_share > 0


# ---------------------------------------------------------------------------- choosing and telling


class Script:
    """In place of `evaluate`: the NDCGs it is told to give, and what it was asked."""

    def __init__(self, ndcgs: list[float]) -> None:
        self.ndcgs = list(ndcgs)
        self.weights: list[dict[str, Tensor]] = []
        self.cases: list[int] = []

    def __call__(self, ranker: RecommenderRanker, holdout: Holdout) -> Metrics:
        state = ranker._model.state_dict()
        self.weights.append({name: weight.clone() for name, weight in state.items()})
        self.cases.append(len(holdout))
        ndcg = self.ndcgs[len(self.weights) - 1]
        return Metrics(10, ndcg, ndcg, ndcg, 1.0, len(holdout), np.zeros(0, np.int64))


def scripted(
    monkeypatch: pytest.MonkeyPatch, ndcgs: list[float], **config: Any
) -> tuple[Fitted, Script]:
    script = Script(ndcgs)
    monkeypatch.setattr(models.train, "evaluate", script)
    split = leave_one_out(cycle(users=8, length=6, items=10))
    config = {"epochs": len(ndcgs), "patience": 2} | config
    return train(split.train, replace(QUICK, **config), validation=split.test), script


def test_the_best_epoch_is_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, its metrics and its number; training stops when nothing better comes."""
    fitted, script = scripted(monkeypatch, [0.1, 0.3, 0.2, 0.3, 0.9])
    assert (fitted.epoch, len(script.weights)) == (2, 4)
    assert fitted.validation is not None
    assert fitted.validation.ndcg == 0.3
    assert [record["ndcg"] for record in fitted.history] == [0.1, 0.3, 0.2, 0.3]
    assert [record["epoch"] for record in fitted.history] == [1, 2, 3, 4]
    for name, weight in fitted.model.state_dict().items():
        assert torch.equal(weight, script.weights[1][name])
    assert not torch.equal(script.weights[1]["ids.weight"], script.weights[3]["ids.weight"])
    assert not fitted.model.training


def test_a_better_epoch_renews_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only validations in a row without a better one count."""
    fitted, script = scripted(monkeypatch, [0.5, 0.1, 0.6, 0.1, 0.7, 0.1])
    assert (fitted.epoch, len(script.weights)) == (5, 6)


def test_validation_may_be_rarer_than_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second epoch, and after the last."""
    fitted, _ = scripted(monkeypatch, [0.1, 0.2, 0.3], epochs=5, validate_every=2)
    assert [("ndcg" in record) for record in fitted.history] == [False, True, False, True, True]
    assert fitted.epoch == 5


def test_validation_takes_a_sample_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many cases, the same at each epoch."""
    _, script = scripted(monkeypatch, [0.1, 0.2], validation_users=3)
    assert script.cases == [3, 3]


def test_without_validation_the_last_epoch_is_taken() -> None:
    """And there is nothing to report of it."""
    fitted = train(cycle(users=6, length=4, items=10), replace(QUICK, epochs=2))
    assert fitted.validation is None
    assert fitted.epoch == 2
    assert [record.keys() for record in fitted.history] == [{"epoch", "loss"}] * 2
    assert fitted.seconds > 0


def test_progress_is_told_after_every_step() -> None:
    """Epochs and steps count from 1, seconds never fall, the latest validation is shown."""
    split = leave_one_out(cycle(users=20, length=8, items=10))
    told: list[Progress] = []
    config = replace(QUICK, epochs=3)
    fitted = train(split.train, config, validation=split.validation, progress=told.append)
    steps = [p.steps for p in told]
    expected = [(epoch, step) for epoch in (1, 2, 3) for step in range(1, steps[0] + 1)]
    assert steps[0] > 1
    assert [(p.epoch, p.step) for p in told] == expected
    assert {p.epochs for p in told} == {3}
    assert sorted(p.seconds for p in told) == [p.seconds for p in told]
    assert all(math.isfinite(p.loss) and p.loss > 0 for p in told)
    assert [p.validation is None for p in told] == [p.epoch == 1 for p in told]
    assert told[-1].loss == fitted.history[-1]["loss"]
    assert told[-1].loss < told[0].loss


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("shape", [(9, DIMENSION), (10, DIMENSION + 1), (10,), (10, DIMENSION, 1)])
def test_content_must_fit_the_log(shape: tuple[int, ...]) -> None:
    """The message says what was wanted and what came."""
    log = cycle(users=3, length=3, items=10)
    with pytest.raises(ValueError, match=rf"content must be \[10, {DIMENSION}\]"):
        fit(log, np.zeros(shape, np.float32), shape=tiny(10), config=QUICK)


def test_without_a_shape_content_must_still_be_a_table() -> None:
    """One row for each item."""
    log = cycle(users=3, length=3, items=10)
    for shape in ((9, 4), (10,)):
        with pytest.raises(ValueError, match=r"content must be \[10, "):
            fit(log, np.zeros(shape, np.float32), config=QUICK)


def test_a_shape_of_another_number_of_items_is_refused() -> None:
    """Its id table would not be the log's."""
    log = cycle(users=3, length=3, items=10)
    with pytest.raises(ValueError, match="items"):
        fit(log, content(10), shape=tiny(11), config=QUICK)


def test_content_must_be_finite() -> None:
    """One NaN would be in every weight after one step."""
    wrong = content(10)
    wrong[3, 2] = np.nan
    with pytest.raises(ValueError, match="content must be finite"):
        fit(cycle(users=3, length=3, items=10), wrong, config=QUICK)


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_weights_must_be_positive(weight: float) -> None:
    """They enter as log w."""
    log = cycle(users=3, length=3, items=10)
    weights = log.weights.copy()
    weights[4] = weight
    with pytest.raises(ValueError, match="weights must be greater than 0"):
        train(replace(log, weights=weights))


@pytest.mark.parametrize("length", [0, 1])
def test_single_events_teach_no_order(length: int) -> None:
    """Nobody with two events is an error that says so."""
    with pytest.raises(ValueError, match="no user has two events"):
        train(cycle(users=5, length=length, items=10))


# ---------------------------------------------------------------------------- the ranker


class TestRecommenderRanker(RankerContract):
    """The contract, for a trained recommender."""

    tolerance = 1e-4

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        config = replace(QUICK, epochs=40, batch_tokens=48)
        return RecommenderRanker(train(log, config).model, content(log.n_items))


@pytest.mark.parametrize("told", [False, True])
def test_ranking_and_serving_agree(told: bool) -> None:
    """The evaluated score is the served one, for the same history at the same time: to 1e-4."""
    model = random_model(5, window=10)
    snapshot = small_snapshot(12, model)
    ranker = RecommenderRanker(model, snapshot.catalogue.content)
    log = drawn_log(6, [10, 1, 4, 0, 7], 12)
    users = np.arange(5, dtype=np.int32)
    mine = [log.user(user) for user in range(5)]
    last = [int(each.timestamps[-1]) if len(each.items) else 0 for each in mine]
    asked = np.array(last) + (5 * DAY if told else 0)
    got = ranker.scores(log, users, asked if told else None)
    for user, each in enumerate(mine):
        made = Past(each.items, each.timestamps, each.weights)
        memory = remember(snapshot, made, int(asked[user]))
        expected = score(snapshot, memory, np.arange(12)).total
        np.testing.assert_allclose(got[user], expected, atol=1e-4)


def test_the_ranker_reads_the_last_window() -> None:
    """Of longer histories, what a service without the older events would see."""
    model = random_model(7, window=4)
    ranker = RecommenderRanker(model, content(12))
    log = drawn_log(8, [9, 4, 20], 12)
    users = np.arange(3, dtype=np.int32)
    whole, last = (ranker.scores(each, users, None) for each in (log, log.last(4)))
    np.testing.assert_allclose(whole, last, atol=1e-5)


def test_a_log_without_any_event_is_scored() -> None:
    """Everyone is new: the prior."""
    model = random_model(7)
    log = drawn_log(8, [0, 0], 12)
    scores = RecommenderRanker(model, content(12)).scores(log, np.array([1, 0], np.int32), None)
    prior = model.prior.detach().numpy()
    np.testing.assert_allclose(scores, [prior, prior], atol=1e-6)


def test_many_users_are_ranked_in_the_order_asked() -> None:
    """Batches inside are by length; rows come back in the caller's order."""
    model = random_model(7)
    log = drawn_log(9, list(np.random.default_rng(0).integers(0, 30, 60)), 12)
    ranker = RecommenderRanker(model, content(12))
    users = np.random.default_rng(1).permutation(60).astype(np.int32)
    together = ranker.scores(log, users, None)
    for place in range(0, 60, 7):
        alone = ranker.scores(log, users[place : place + 1], None)
        np.testing.assert_allclose(together[place], alone[0], atol=1e-4)
