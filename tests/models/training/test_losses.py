"""Training losses compared with float64 loops, and sampled gradients with full ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import models.training.losses
import models.training.window_batch
from models.data.interactions import Interactions
from models.recommender.recommender import Recommender
from models.training.log_profile import repeat_share
from models.training.losses import SoftmaxItems, TrainingLosses, seen_columns
from models.training.presets import TrainConfig
from models.training.window_batch import WindowBatch, draw_stateless_rows
from tests.support.plain_losses import PlainLosses, cross_entropy, probabilities, worths
from tests.support.small import DAY, SECOND, TOLD
from tests.support.training import content, counted_model, drawn_log, tiny

ALWAYS = np.array([[0, 7], [3, 9], [9, 11], [11, 15]])  # windows of `log_of`, one user's twice


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in float32, whatever this machine is fast in."""
    in_dtype(monkeypatch, torch.float32)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Losses draw from torch's own generator, which training seeds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use trends of age 0, unless a test is about their age."""
    monkeypatch.setattr(models.training.window_batch, "MAX_POPULARITY_AGE", 0)


def in_dtype(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(models.training.losses, "product_dtype", lambda device: dtype)


def log_of(seed: int, *, again: bool, items: int = 12) -> Interactions:
    """Users of 9, 2, 4 and 1 events, and some more to count what follows what.

    Of three types, one of them dislikes.
    """
    log = drawn_log(seed, [9, 2, 4, 1, 8, 8, 8], items, again=again)
    types = np.random.default_rng(seed).integers(0, 3, len(log)).astype(np.int16)
    return replace(log, types=types, dislike_type=1)


def in_baskets(log: Interactions) -> Interactions:
    """The log with times of every user's own, days apart, several events at most of them."""
    rng = np.random.default_rng(len(log))
    times = [
        np.sort(rng.choice([0, SECOND, DAY, 9 * DAY, 40 * DAY], length))
        for length in log.lengths.tolist()
    ]
    return replace(log, timestamps=np.concatenate(times))


def losses(
    model: Recommender,
    log: Interactions,
    texts: NDArray[np.float32] | None = None,
    **more: Any,
) -> TrainingLosses:
    given: dict[str, Any] = {
        "id_dropout": 0.0,
        "request_time_share": 0.0,
        "full_softmax_items": 1000,
        "sampled_negatives": 5,
        "item_rows_share": 0.0,
    }
    texts = content(log.n_items) if texts is None else texts
    return TrainingLosses(model, log, texts, TrainConfig(**given | more))


def all_worths(log: Interactions, *, baskets: bool = False, new: bool = False) -> list[float]:
    """Return the weights of the targets of the windows."""
    each = (worths(log, *span, baskets=baskets, new=new) for span in ALWAYS.tolist())
    return [worth for window in each for worth in window]


def by_loop(
    plain: PlainLosses,
    log: Interactions,
    stage: str,
    *,
    sees_all: bool = False,
    worth: Mapping[int, float] | None = None,
    stateless: Sequence[int | None] = (0,) * len(ALWAYS),
    baskets: bool = False,
    new: bool = False,
) -> float:
    """The mean cross-entropy of the targets of the windows, weighted by `worths`."""
    values = [
        cross_entropy(
            first if stage == "full_softmax" else whole, target, set() if sees_all else seen, worth
        )
        for (begin, end), rows in zip(ALWAYS.tolist(), stateless, strict=True)
        for first, whole, target, seen in plain.at(begin, end, stateless=rows)
    ]
    counts = all_worths(log, baskets=baskets, new=new)
    assert len(values) == len(counts)
    return math.fsum(np.multiply(values, counts)) / math.fsum(counts)


# ---------------------------------------------------------------------------- against the loops


KINDS = [
    {},
    {"next_basket": True},
    {"repeat_consumption": False},
    {"next_basket": True, "repeat_consumption": False},
]


STAGES = ["full_softmax", "sampled_softmax"]


@pytest.mark.parametrize(
    ("stage", "shape", "chunk"),
    [
        *(("full_softmax", TOLD, chunk) for chunk in (1, 120, 4_608)),
        *(
            ("sampled_softmax", shape, 120)
            for shape in ({}, TOLD, {"tied_values": True}, TOLD | {"blocks": 0}, {"most": 0})
        ),
    ],
)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_losses_equal_the_loop(
    told: bool,
    again: bool,
    stage: str,
    shape: dict[str, Any],
    chunk: int,
    kind: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the target in the queries, and with it: the loop over each target's prefix.

    Where people come back to what they had, nothing is hidden, and how often they had it counts;
    unless only what is new is asked for. A basket is asked for from what came before it.
    """
    monkeypatch.setattr(models.training.losses, "CHUNK_LOGITS", chunk)
    log = log_of(1, again=again)
    log = in_baskets(log) if "next_basket" in kind else log
    assert (repeat_share(log) >= 0.01) == again
    model = counted_model(3, log, **shape, **kind)
    repeats = model.config.repeat_consumption
    assert repeats == (again and "repeat_consumption" not in kind)
    with torch.inference_mode():
        loss, targets = getattr(losses(model, log, request_time_share=float(told)), stage)(ALWAYS)
    plain = PlainLosses(model, log, content(12), told=told)
    baskets, new = "next_basket" in kind, again and not repeats
    assert targets == pytest.approx(math.fsum(all_worths(log, baskets=baskets, new=new)))
    expected = by_loop(plain, log, stage, sees_all=repeats, baskets=baskets, new=new)
    assert float(loss) == pytest.approx(expected, abs=2e-5 if stage == "full_softmax" else 1e-4)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rows", [[0, 0, 0, 0], [3, 1, 0, 2], [6, 6, 6, 6], [0, 4, 6, 1]])
def test_rows_without_states_equal_the_loop(
    stage: str, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest rows of a window lack their states; all 6 of a window, the user state too."""
    monkeypatch.setattr(
        models.training.losses, "draw_stateless_rows", lambda *args: torch.tensor(rows)[:, None]
    )
    log = log_of(5, again=False)
    model = counted_model(6, log, **TOLD)
    with torch.inference_mode():
        loss, _ = getattr(losses(model, log, item_rows_share=1.0), stage)(ALWAYS)
    plain = PlainLosses(model, log, content(12), told=False)
    stateless = [None if count == 6 else count for count in rows]
    expected = by_loop(plain, log, stage, stateless=stateless)
    assert float(loss) == pytest.approx(expected, abs=1e-4)


def test_rows_without_states_are_drawn_by_window() -> None:
    windows, length, share = 20_000, 6, 0.3
    rows = draw_stateless_rows(windows, length, share)
    assert rows.shape == (windows, 1)
    found = torch.bincount(rows[:, 0], minlength=length + 1) / windows
    some = share * 0.8 / length
    expected = torch.tensor([1 - share + some, *[some] * (length - 1), share * 0.2])
    assert torch.allclose(found, expected, atol=0.01)
    assert not draw_stateless_rows(windows, length, 0.0).any()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("new", [range(12), (0, 3, 4, 9)])
def test_items_without_their_id_are_as_new_ones(
    stage: str, new: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(5, again=False)
    model = counted_model(6, log)
    texts = content(12)
    texts[[item for item in range(12) if item not in new]] = 0  # without a text the id stays
    trained = losses(model, log, texts, id_dropout=1.0)
    monkeypatch.setattr(models.training.losses, "ATTENTION_SAMPLE", 10**6)  # every item is drawn
    with torch.inference_mode():
        loss, _ = getattr(trained, stage)(ALWAYS)
    plain = PlainLosses(model, log, texts, told=False, new=new)
    assert float(loss) == pytest.approx(by_loop(plain, log, stage), abs=1e-4)


def test_sampled_loss_equals_the_corrected_loop() -> None:
    torch.manual_seed(1)
    log = log_of(7, again=False, items=30)
    model = counted_model(8, log, dim=12)
    drawing = losses(model, log, full_softmax_items=10)
    state = torch.get_rng_state()
    with torch.inference_mode():
        loss, _ = drawing.full_softmax(ALWAYS)
    again = losses(model, log, full_softmax_items=10)
    torch.set_rng_state(state)
    drawn = again.draw(ALWAYS).items
    assert len(drawn.rows) < 25
    worth = dict(zip(drawn.rows.tolist(), drawn.correction.exp().tolist(), strict=True))
    assert 0 not in worth, "the padding's item was to be none of them"
    plain = PlainLosses(model, log, content(30), told=False)
    assert float(loss) == pytest.approx(by_loop(plain, log, "full_softmax", worth=worth), abs=2e-5)


@pytest.mark.parametrize("loss", ["full_softmax", "sampled_softmax"])
def test_a_narrow_dtype_stays_near(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 keeps 8 bits: losses within 1 %, gradients within 3 % of their length."""
    log = log_of(9, again=False)
    model = counted_model(10, log)
    found: list[tuple[float, Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16):
        in_dtype(monkeypatch, dtype)
        model.zero_grad()
        value, _ = getattr(losses(model, log), loss)(ALWAYS)
        value.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found.append((value.item(), torch.cat([each.flatten() for each in gradients])))
    (exact, exact_gradient), (near, near_gradient) = found
    assert near != exact
    assert near == pytest.approx(exact, rel=0.01)
    assert (near_gradient - exact_gradient).norm() < 0.03 * exact_gradient.norm()


def test_a_batch_of_dislikes_teaches_nothing() -> None:
    log = log_of(9, again=False)
    log = replace(log, types=np.where(np.arange(len(log)) < 9, 1, log.types).astype(np.int16))
    model = counted_model(10, log, **TOLD)
    for name in ("full_softmax", "sampled_softmax"):
        loss, count = getattr(losses(model, log), name)(np.array([[0, 9]]))
        loss.backward()
        assert (loss.item(), count) == (0, 0)
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)


# ---------------------------------------------------------------------------- what learns


@pytest.mark.parametrize("blocks", [0, 2])
def test_each_loss_teaches_its_own_part(blocks: int) -> None:
    log = log_of(11, again=False)
    model = counted_model(12, log, blocks=blocks, **TOLD)
    never = ["cross_attention.w_q."]  # the target's part of the queries
    if blocks:
        losses(model, log, request_time_share=0.5, id_dropout=0.3).full_softmax(ALWAYS)[
            0
        ].backward()  # type: ignore[no-untyped-call]
        _check_gradients(model, never)
        model.zero_grad()
    losses(model, log, id_dropout=0.3).sampled_softmax(ALWAYS)[0].backward()  # type: ignore[no-untyped-call]
    # Without an encoder there are no transitions, and no request is ever at no time.
    _check_gradients(model, [] if blocks else ["transition_scale."])


def test_the_event_type_bias_learns_from_its_initial_value() -> None:
    log = drawn_log(11, [9, 2, 4, 1], 12, again=False)
    types = np.random.default_rng(11).integers(0, 2, len(log)).astype(np.int16)
    log = replace(log, types=types, weights=np.ones(len(log), np.float32))
    model = Recommender(tiny(12, n_event_types=2))
    losses(model, log).full_softmax(ALWAYS)[0].backward()  # type: ignore[no-untyped-call]
    assert model.type_bias is not None
    assert model.type_bias.bias.grad is not None
    assert bool(model.type_bias.bias.grad.any())


def _check_gradients(model: Recommender, never: Collection[str]) -> None:
    """Check that all parameters but those that begin with `never` have a finite gradient."""
    for name, weight in model.named_parameters():
        if name.startswith(tuple(never)):
            assert weight.grad is None, name
            continue
        assert weight.grad is not None, name
        assert torch.isfinite(weight.grad).all(), name
        assert weight.grad.abs().sum() > 0, name


def calm(model: Recommender) -> Recommender:
    """Scale the weights so that scores have a spread of about 1."""
    with torch.no_grad():
        for weight in (
            model.id_embedding.weight,
            model.content_projection.weight,
            model.prior,
            model.cross_attention.w_o.weight,
            *([] if model.state_attention is None else [model.state_attention.value.weight]),
        ):
            weight.mul_(0.4)
    return model


def far(found: NDArray[np.float64], exact: NDArray[np.float64]) -> tuple[float, float]:
    """Return the relative errors of the mean gradient and of single gradients.

    The mean's is at most a little more than its standard error: the logarithm of an unbiased
    estimate is a little low.
    """
    length = np.linalg.norm(exact)
    each = np.linalg.norm(found - exact, axis=1)
    return float(np.linalg.norm(found.mean(0) - exact) / length), float(each.mean() / length)


def test_sampled_gradient_equals_the_full_one_on_average() -> None:
    items = 40
    log = drawn_log(13, [9, 5, 7, 3], items, again=False)
    model = calm(counted_model(14, log))
    spans = np.array([[0, 9], [9, 14], [14, 21], [21, 24]])
    plain = PlainLosses(model, log, content(items), told=False)
    exact, targets = np.zeros(items), 0.0
    for begin, end in spans.tolist():
        cases = zip(plain.at(begin, end), worths(log, begin, end), strict=True)
        for (first, _, target, seen), count in cases:
            exact += count * probabilities(first, target, seen)
            exact[target] -= count
            targets += count
    drawing = losses(model, log, full_softmax_items=10, sampled_negatives=12)
    found = [
        torch.autograd.grad(drawing.full_softmax(spans)[0], model.prior)[0].numpy()
        for _ in range(1000)
    ]
    together, each = far(np.array(found, np.float64), exact / targets)
    assert together < 0.05
    assert each > 0.4


def test_the_attentions_gradient_is_on_average_that_of_all_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = 40
    log = drawn_log(15, [6, 4, 7, 3], items, again=False)
    model = calm(counted_model(16, log))
    spans = np.array([[0, 6], [6, 10], [10, 17], [17, 20]])
    all_of_them = losses(model, log)

    def gradient() -> NDArray[np.float64]:
        loss, _ = all_of_them.sampled_softmax(spans)
        parts = torch.autograd.grad(loss, list(model.cross_attention.parameters()))
        flat: NDArray[np.float64] = torch.cat([each.flatten() for each in parts]).double().numpy()
        return flat

    monkeypatch.setattr(models.training.losses, "ATTENTION_SAMPLE", 100 * items)
    exact = gradient()
    assert np.array_equal(exact, gradient())
    monkeypatch.setattr(models.training.losses, "ATTENTION_SAMPLE", 20)
    together, each = far(np.array([gradient() for _ in range(600)]), exact)
    assert together < 0.06
    assert each > 0.2


# ---------------------------------------------------------------------------- seen and repeated


def batch_of(inputs: Tensor, targets: Tensor) -> WindowBatch:
    zeros = torch.zeros_like(inputs)
    real = torch.ones(inputs.shape, dtype=torch.bool)
    plain = zeros.float(), zeros, real.float()  # of weight 1 and one type
    return WindowBatch(inputs, targets, zeros, zeros, *plain, real, zeros.numpy(), zeros, None)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), items=st.integers(1, 6), length=st.integers(1, 7))
def test_seen_items_are_hidden_from_each_position(seed: int, items: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    inputs, targets = (torch.from_numpy(rng.integers(0, items, (2, length))) for _ in range(2))
    rows = torch.from_numpy(rng.permutation(items)[: int(rng.integers(1, items + 1))])
    column = torch.full((items + 1,), len(rows))
    column[rows] = torch.arange(len(rows))
    candidates = SoftmaxItems(rows, column, torch.zeros(len(rows)))
    hidden = seen_columns(batch_of(inputs, targets), candidates, candidates.columns(targets))
    assert hidden.shape == (2, length, len(rows))
    for row, place, at in np.ndindex(2, length, len(rows)):
        item = int(rows[at])
        before = item in inputs[row, : place + 1].tolist()
        assert bool(hidden[row, place, at]) == (before and item != int(targets[row, place]))


def test_trends_may_be_days_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trends of each window are aged uniformly up to MAX_POPULARITY_AGE."""
    log = in_baskets(log_of(1, again=True))
    drawing = losses(counted_model(3, log, next_basket=True), log)
    fresh = drawing.draw(ALWAYS).batch.popularity_times
    monkeypatch.setattr(models.training.window_batch, "MAX_POPULARITY_AGE", 14 * DAY)
    ages = torch.stack([fresh - drawing.draw(ALWAYS).batch.popularity_times for _ in range(200)])
    assert (ages == ages[:, :, :1]).all(), "one age for a window"
    assert (ages >= 0).all()
    assert (ages < 14 * DAY).all()
    assert ages[:, :, 0].float().mean() == pytest.approx(7 * DAY, rel=0.05)
