"""The recommender: every part against a float64 loop over its weights."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import build_memory
from models.ranking.recommend import coarse_query
from models.ranking.scoring import score
from models.recommender.recommender import Recommender, RecommenderConfig, content_only_model
from models.recommender.target_attention import (
    ItemTables,
    target_attention,
    target_attention_prefixes,
)
from tests.support import reference
from tests.support.reference_model import ReferenceModel
from tests.support.small import (
    DAY,
    DIMENSION,
    encode,
    past,
    random_model,
)
from tests.support.small import catalogue as small_catalogue
from tests.support.small import snapshot as small_snapshot

HEADS, ATTENTION_HEADS, LENGTH = 3, 4, 7


@pytest.fixture(scope="module")
def content() -> Tensor:
    return torch.from_numpy(encode([f"item {n}" for n in range(15)]))


def projected(model: Recommender, content: Tensor) -> ItemTables:
    with torch.inference_mode():
        rows = torch.arange(len(content))
        trained = rows < model.config.n_items
        return model.item_tables(rows.where(trained, -1), content)


# ---------------------------------------------------------------------------- item tower


@pytest.mark.parametrize("tied", [False, True])
def test_tables_equal_the_loop(content: Tensor, tied: bool) -> None:
    """Vectors, queries, keys, values and outputs of trained items and of ones known by text."""
    model = random_model(1, tied_values=tied)
    tables = projected(model, content)
    expected = ReferenceModel(model, HEADS)
    for row in range(15):
        vector = expected.vector(row if row < 12 else -1, content[row].numpy())
        np.testing.assert_allclose(tables.vectors[row], vector, atol=1e-5)
        parts = expected.project(vector)
        found = (tables.queries, tables.keys, tables.values, tables.outputs)
        for table, name in zip(found, ("query", "key", "value", "output"), strict=True):
            np.testing.assert_allclose(table[:, row], parts[name], atol=1e-5)
    assert (tables.keys is tables.values) == tied


def test_the_prior_of_untrained_items_is_that_of_the_new(content: Tensor) -> None:
    model = random_model(1)
    prior = projected(model, content).prior
    np.testing.assert_array_equal(prior[:12], model.prior.detach())
    assert prior[12:].tolist() == [model.new_prior.item()] * 3
    assert model.new_prior.item()


def test_an_item_without_its_id_is_its_text(content: Tensor) -> None:
    model = random_model(2)
    rows = torch.arange(12)
    with torch.inference_mode():
        dropped = model.item_vectors(rows, content[:12], torch.zeros(12, dtype=torch.bool))
        never = model.item_vectors(torch.full((12,), -1), content[:12])
        kept = model.item_vectors(rows, content[:12], rows % 2 == 0)
        whole = model.item_vectors(rows, content[:12])
    np.testing.assert_array_equal(dropped, never)
    np.testing.assert_array_equal(kept[::2], whole[::2])
    np.testing.assert_array_equal(kept[1::2], never[1::2])
    assert not np.allclose(whole, never, atol=1e-2)


# ---------------------------------------------------------------------------- target attention


def memory(model: Recommender, seed: int, batch: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, L, d] of events drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    events = torch.randn(batch, LENGTH, 12, generator=generator)
    with torch.inference_mode():
        normed = model.item_norm(events)
        return model.cross_attention.keys_values(normed)


def loop(tables: ItemTables, keys: Tensor, values: Tensor, bias: Tensor) -> NDArray[np.float64]:
    """Σ_h ⟨context_h, o_h⟩ of every item for one history, [N], through the float64 `attend`."""
    total = np.zeros(tables.vectors.shape[0])
    for head in range(ATTENTION_HEADS):
        added = np.broadcast_to(bias[head].double().numpy(), (len(total), keys.shape[1]))
        _, context = reference.attend(
            tables.queries[head].double().numpy(),
            keys[head].double().numpy(),
            values[head].double().numpy(),
            added,
            np.ones(added.shape, dtype=np.bool_),
        )
        total += (context * tables.outputs[head].double().numpy()).sum(1)
    return total


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
    hidden=st.sampled_from([0.0, 0.4]),
)
def test_all_prefixes_at_once_equal_one_by_one(
    content: Tensor, seed: int, spread: float, hidden: float
) -> None:
    """Each prefix of each history under its own biases and masks, against the float64 loop."""
    model = random_model(seed % 5, tied_values=bool(seed % 2))
    tables = projected(model, content)
    generator = torch.Generator().manual_seed(seed)
    keys, values = memory(model, seed, 2)
    bias = spread * torch.randn(2, ATTENTION_HEADS, LENGTH, LENGTH, generator=generator)
    position = torch.arange(LENGTH)
    masked = torch.rand(2, 1, LENGTH, LENGTH, generator=generator) < hidden
    masked |= position > position[:, None]
    masked &= position != position[:, None]  # every prefix sees its own last event
    bias = bias.masked_fill(masked, -math.inf)
    with torch.inference_mode():
        got = target_attention_prefixes(tables.queries, tables.outputs, keys, values, bias)
    assert got.shape == (2, LENGTH, 15)
    for row in range(2):
        for place in range(LENGTH):
            expected = loop(tables, keys[row], values[row], bias[row, :, place])
            np.testing.assert_allclose(got[row, place], expected, atol=1e-5, rtol=1e-5)


def test_a_prefix_that_sees_nothing_has_nothing(content: Tensor) -> None:
    """A prefix with all rows hidden has score 0 and gradients of 0."""
    model = random_model(3)
    tables = ItemTables(*(table.clone() for table in projected(model, content)))
    keys, values = (x.clone().requires_grad_() for x in memory(model, 3, 2))
    raw = torch.randn(
        2, ATTENTION_HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)
    )
    raw.requires_grad_()
    position = torch.arange(LENGTH)
    hidden = (position > position[:, None]).expand(raw.shape).clone()
    hidden[:, 2, :, :4] = True  # a head that sees nothing at first
    hidden[1] = True
    bias = raw.masked_fill(hidden, -math.inf)
    got = target_attention_prefixes(tables.queries, tables.outputs, keys, values, bias)
    for row, place in np.ndindex(2, LENGTH):
        found = keys.detach()[row], values.detach()[row], bias.detach()[row, :, place]
        np.testing.assert_allclose(got.detach()[row, place], loop(tables, *found), atol=1e-5)
    got.sum().backward()  # type: ignore[no-untyped-call]
    for each in (keys.grad, values.grad, raw.grad):
        assert each is not None
        assert torch.isfinite(each).all()
        assert each[0].any()
        assert not each[1].any()


def test_prefixes_survive_a_peak_in_their_future(content: Tensor) -> None:
    """An event with a much larger score leaves earlier prefixes accurate."""
    model = random_model(6)
    tables = projected(model, content)
    keys, values = memory(model, 6, 1)
    last = keys[0, :, -1:].clone()  # (H, 1, d)
    ahead = (tables.queries @ last.mT).amax((1, 2), keepdim=True) / last.shape[2] ** 0.5
    keys = torch.cat([torch.zeros_like(keys[:, :, :-1]), (60 / ahead * last)[None]], 2)
    position = torch.arange(LENGTH)
    bias = torch.zeros(1, ATTENTION_HEADS, LENGTH, LENGTH)
    bias = bias.masked_fill(position > position[:, None], -math.inf)
    tables = ItemTables(*(table.clone() for table in tables))
    keys.requires_grad_()
    got = target_attention_prefixes(tables.queries, tables.outputs, keys, values.clone(), bias)
    for place in range(LENGTH):
        expected = loop(tables, keys.detach()[0], values[0], bias[0, :, place])
        np.testing.assert_allclose(got.detach()[0, place], expected, atol=1e-4, rtol=1e-4)
    got.sum().backward()  # type: ignore[no-untyped-call]
    assert keys.grad is not None
    assert torch.isfinite(keys.grad).all()


def test_prefixes_learn_as_the_operator_does(content: Tensor) -> None:
    model = random_model(7)
    tables = projected(model, content)
    tables = ItemTables(*(table.clone() for table in tables))
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(1, LENGTH, 15, generator=generator)
    position = torch.arange(LENGTH)
    future = position > position[:, None]
    gradients = []
    for way in ("together", "apart"):
        keys, values = (x.clone().requires_grad_() for x in memory(model, 7, 1))
        raw = torch.randn(
            1, ATTENTION_HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(8)
        )
        raw.requires_grad_()
        bias = raw.masked_fill(future, -math.inf)
        if way == "together":
            out = target_attention_prefixes(tables.queries, tables.outputs, keys, values, bias)
        else:
            rows = [target_attention(tables, keys, values, bias[:, :, t]) for t in range(LENGTH)]
            out = torch.stack(rows, 1)
        (out * weight).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append((keys.grad, values.grad, raw.grad))
    for together, apart in zip(*gradients, strict=True):
        assert together is not None
        assert apart is not None
        np.testing.assert_allclose(together, apart, atol=2e-5)


# ---------------------------------------------------------------------------- states


@pytest.mark.parametrize("tied", [False, True])
def test_attended_rows_have_their_states(tied: bool) -> None:
    """Keys and values are those of the item and, where the event has a state, of the state."""
    model = random_model(2, tied_values=tied)
    generator = torch.Generator().manual_seed(2)
    vectors, states = torch.randn(2, 2, 5, 12, generator=generator)
    has_state = (torch.arange(5) >= torch.tensor([[2], [0]]))[..., None].float()
    with torch.inference_mode():
        keys, values = model.attended_rows(vectors, states, has_state)
    assert keys.shape == values.shape == (2, ATTENTION_HEADS, 5, 4)
    expected = ReferenceModel(model, HEADS)
    for row, place in np.ndindex(2, 5):
        parts = expected.project(vectors[row, place].double().numpy())
        for found, name in ((keys, "key"), (values, "value")):
            wanted = parts[name]
            if has_state[row, place]:
                weight = expected.state[f"state_attention.{name}.weight"]
                projected = weight @ states[row, place].double().numpy()
                wanted = wanted + projected.reshape(ATTENTION_HEADS, -1)
            np.testing.assert_allclose(found[row, :, place], wanted, atol=1e-5)


def test_the_moment_of_user_queries_is_that_of_normed_states() -> None:
    """The mean of q qᵀ over many states of unit variance is the estimate."""
    model = random_model(5)
    with torch.inference_mode():
        states = torch.randn(200_000, 12, generator=torch.Generator().manual_seed(5))
        queries = model.user_query(states).transpose(0, 1)
        mean = queries.mT @ queries / len(states)
        assert model.state_attention is not None
        found = model.state_attention.query_moment()
    torch.testing.assert_close(found, mean, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("heads", [1, 3, 4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_an_untrained_readout_is_near_the_mean_of_the_states(heads: int, tied: bool) -> None:
    """Before training no target has a query of its own, and values are about the states."""
    torch.manual_seed(1)
    config = RecommenderConfig(
        n_items=8, content_dim=DIMENSION, dim=24, heads=3, attention_heads=heads, tied_values=tied
    )
    model = Recommender(config).eval()
    vectors, states = torch.randn(2, 1, 9, 24)
    with torch.inference_mode():
        _, values = model.attended_rows(vectors, states, torch.ones(1, 9, 1))
        readout = model.read_out(values, torch.zeros(1, heads, 9))[0]
    assert not model.cross_attention.w_q.weight.any()
    mean = states[0].mean(0)
    size = heads * 8
    kept = mean[:size] if size < 24 else mean
    given = readout[:size] if size < 24 else readout
    assert float(torch.cosine_similarity(given, kept, dim=0)) > 0.9


def test_without_an_encoder_there_are_no_states() -> None:
    events, times = torch.randn(2, 5, 12), torch.zeros(2, 5, dtype=torch.int64)
    bare = random_model(1, blocks=0)
    states = bare.event_states(events, times)
    assert not states.any()
    assert not bare.user_states(states, times, times).any()
    assert random_model(1).event_states(events[:, :0], times[:, :0]).shape == (2, 0, 12)


# ---------------------------------------------------------------------------- candidates


def test_the_readout_gives_the_score_where_targets_have_no_query() -> None:
    model = random_model(9)
    with torch.no_grad():
        model.cross_attention.w_q.weight.zero_()
    snapshot_ = small_snapshot(15, model)
    made = past([3, 1, 4, 1, 5], [0, 5, DAY, DAY, 2 * DAY], [1, 2, 0.5, 1, 1])
    user = build_memory(snapshot_, made, 3 * DAY)
    scores = score(snapshot_, user, np.arange(15))
    with torch.inference_mode():
        readout = coarse_query(snapshot_, user).readout
    short = snapshot_.tables.vectors @ readout + snapshot_.tables.prior
    np.testing.assert_allclose(short + scores.transitions, scores.total, atol=1e-4)


# ---------------------------------------------------------------------------- before training


def test_identity_ranks_by_likeness_to_what_was_seen() -> None:
    """In the content model the attention part of one event is the cosine with its text."""
    made = small_catalogue(10)
    snapshot_ = Snapshot.build("v", None, made, np.zeros(10, np.int64))
    user = build_memory(snapshot_, past([4], [0]), 0)
    scores = score(snapshot_, user, np.arange(10))
    # LayerNorm takes the mean out of the event's vector, and not out of the target's.
    centred = made.content - made.content.mean(1, keepdims=True)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    np.testing.assert_allclose(scores.attention, made.content @ centred[4], atol=1e-3)
    assert int(scores.total.argmax()) == 4
    assert (scores.transitions == 0).all()


def test_identity_holds_nothing_trained() -> None:
    """The content model has no items and no encoder and handles items without text."""
    model = content_only_model(DIMENSION)
    assert model.config.n_items == 0
    assert model.encoder is None
    assert not model.training
    with torch.inference_mode():
        tables = model.item_tables(torch.full((2,), -1), torch.zeros(2, DIMENSION))
    assert all(torch.isfinite(table).all() for table in tables)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_items": -1},
        {"dim": 0},
        {"dim": 1.5},
        {"heads": 0},
        {"heads": 5},
        {"attention_heads": 0},
        {"attention_heads": 1.5},
        {"blocks": -1},
        {"window": 0},
        {"content_dim": 0},
        {"transitions_per_item": -1},
        {"transitions_per_item": 2.0},
        {"dropout": 1},
        {"dropout": "half"},
        {"tied_values": 1},
        {"n_event_types": 0},
        {"n_event_types": 1.5},
        {"dislike_type": -2},
        {"dislike_type": 0},
        {"dislike_heads": -1},
        {"dislike_heads": 1},
    ],
)
def test_a_shape_that_no_model_can_have_is_refused(wrong: dict[str, Any]) -> None:
    """An invalid configuration field is refused by name."""
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        RecommenderConfig(**{"n_items": 3, "dim": 12} | wrong)
