"""Artifacts of trained models: round trips, and refusal of damaged files."""

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from models.recommender.artifact import DESCRIPTION_FILE, ITEMS_FILE, WEIGHTS_FILE, TrainedModel
from models.recommender.recommender import RecommenderConfig
from tests.support.small import TOLD, random_model, trained

Files = dict[str, bytes]
FOLLOWERS, SUMS = "statistics.transition_items", "statistics.transition_sums"
GAP = "statistics.max_request_gap"


@pytest.fixture(scope="module")
def made() -> TrainedModel:
    return trained(random_model(1))


@pytest.fixture(scope="module")
def files(made: TrainedModel) -> Files:
    return made.to_files()


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tied_values": True},
        {"blocks": 0},
        {"n_items": 0},
        {"transitions_per_item": 0},
        {"transitions_per_item": 30},
        TOLD,
        {"next_basket": True, "repeat_consumption": True},
        {"similar_items": 5},
    ],
)
def test_round_trip_is_exact(shape: dict[str, Any]) -> None:
    """A model read from its files equals the original, bit for bit."""
    before = trained(random_model(2, **shape))
    after = TrainedModel.from_files(before.to_files())
    state = after.model.state_dict()
    assert state.keys() == before.model.state_dict().keys()
    for name, weight in before.model.state_dict().items():
        assert weight.numpy().tobytes() == state[name].numpy().tobytes()
        assert state[name].dtype == weight.dtype
    assert after.model.config == before.model.config
    assert not after.model.training
    assert after.item_ids == before.item_ids
    assert after.item_counts.dtype == np.int64
    np.testing.assert_array_equal(after.item_counts, before.item_counts)
    assert (after.text_encoder, dict(after.metadata)) == ("fake", {"note": "small"})
    assert after.event_types == before.event_types
    assert len(after.event_types) == before.model.config.n_event_types


def test_packing_repeats() -> None:
    """Equal models give equal bytes, also after a round trip."""
    first = trained(random_model(3)).to_files()
    assert trained(random_model(3)).to_files() == first
    assert TrainedModel.from_files(first).to_files() == first


def test_any_id_survives() -> None:
    """Ids are any text: other scripts, quotes, what looks like a number."""
    ids = ("東京", 'a "quoted" id', "007", "ok\n", "😀", "a/b")
    model = random_model(1, n_items=len(ids))
    packed = TrainedModel(model, ids, np.ones(6, np.int64), "fake", {}).to_files()
    assert TrainedModel.from_files(packed).item_ids == ids


def test_files_hold_no_pickle_and_run_nothing(
    made: TrainedModel, files: Files, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"

    class Poison:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    poison = pickle.dumps(Poison())
    for name, content in files.items():
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError)):
            pickle.loads(content)
        with pytest.raises(ValueError, match=name):
            TrainedModel.from_files(files | {name: poison})
    assert not marker.exists()
    pickle.loads(poison)
    assert marker.exists()  # so the poison was one


@pytest.mark.parametrize("name", [WEIGHTS_FILE, DESCRIPTION_FILE, ITEMS_FILE])
def test_a_missing_file_is_named(files: Files, name: str) -> None:
    """Each of the three is needed."""
    with pytest.raises(ValueError, match=f"{name} is missing"):
        TrainedModel.from_files({k: v for k, v in files.items() if k != name})


def described(change: Mapping[str, Any]) -> Callable[[Files], bytes]:
    """Return a function that changes members of the description; None removes one."""

    def corrupt(files: Files) -> bytes:
        description = json.loads(files[DESCRIPTION_FILE]) | change
        return json.dumps({k: v for k, v in description.items() if v is not None}).encode()

    return corrupt


def shaped(**change: Any) -> Callable[[Files], bytes]:
    """The description with a changed shape of the model."""

    def corrupt(files: Files) -> bytes:
        description = json.loads(files[DESCRIPTION_FILE])
        description["config"] |= change
        return json.dumps(description).encode()

    return corrupt


def weighed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Files], bytes]:
    """Return a function that changes the tensors of the weights file."""

    def corrupt(files: Files) -> bytes:
        tensors = load(files[WEIGHTS_FILE])
        change(tensors)
        return save(tensors)

    return corrupt


def cut(name: str, share: float) -> Callable[[Files], bytes]:
    return lambda files: files[name][: int(share * len(files[name]))]


def listed(*ids: object) -> Callable[[Files], bytes]:
    return lambda _: json.dumps(ids).encode()


TWELVE = [f"i{n}" for n in range(12)]

MALFORMED: list[tuple[str, str, Callable[[Files], bytes]]] = [
    *(
        (f"{name}: {share} of it", name, cut(name, share))
        for name in (WEIGHTS_FILE, DESCRIPTION_FILE, ITEMS_FILE)
        for share in (0, 0.5, 0.99)
    ),
    ("not JSON", DESCRIPTION_FILE, lambda _: b"\xff\xfe"),
    ("deep JSON", DESCRIPTION_FILE, lambda _: b"[" * 100_000),
    ("a list", DESCRIPTION_FILE, lambda _: b"[]"),
    ("another format", DESCRIPTION_FILE, described({"format": 99})),
    ("no format", DESCRIPTION_FILE, described({"format": None})),
    ("no shape", DESCRIPTION_FILE, described({"config": None})),
    ("a shape that is no object", DESCRIPTION_FILE, described({"config": [1]})),
    ("no encoder", DESCRIPTION_FILE, described({"text_encoder": None})),
    ("an encoder that is no name", DESCRIPTION_FILE, described({"text_encoder": ["fake"]})),
    ("a format before types", DESCRIPTION_FILE, described({"format": 2})),
    ("a format before states of events", DESCRIPTION_FILE, described({"format": 4})),
    ("no heads of the attention", DESCRIPTION_FILE, shaped(attention_heads=0)),
    ("more heads of the attention", WEIGHTS_FILE, shaped(attention_heads=5)),
    ("more heads than memory holds", WEIGHTS_FILE, shaped(attention_heads=10**12)),
    ("no types", DESCRIPTION_FILE, described({"event_types": None})),
    ("types in a string", DESCRIPTION_FILE, described({"event_types": "v"})),
    ("a type that is a number", DESCRIPTION_FILE, described({"event_types": [7]})),
    ("more names of types", DESCRIPTION_FILE, described({"event_types": ["view", "purchase"]})),
    ("more types than names", DESCRIPTION_FILE, shaped(n_event_types=10**12)),
    ("types in words", DESCRIPTION_FILE, shaped(n_event_types="two")),
    ("a dislike that is no type", DESCRIPTION_FILE, shaped(dislike_type=1)),
    ("heads for dislikes there are none of", DESCRIPTION_FILE, shaped(dislike_heads=1)),
    ("metadata that is no object", DESCRIPTION_FILE, described({"metadata": 3})),
    ("an unknown member of the shape", DESCRIPTION_FILE, shaped(depth=3)),
    ("heads that do not divide", DESCRIPTION_FILE, shaped(heads=5)),
    ("no heads", DESCRIPTION_FILE, shaped(heads=0)),
    ("a fractional dimension", DESCRIPTION_FILE, shaped(dim=1.5)),
    ("a dimension in words", DESCRIPTION_FILE, shaped(dim="twelve")),
    ("negative dimension", DESCRIPTION_FILE, shaped(dim=-12)),
    ("impossible dropout", DESCRIPTION_FILE, shaped(dropout="much")),
    ("dropout above one", DESCRIPTION_FILE, shaped(dropout=1.5)),
    ("tied in words", DESCRIPTION_FILE, shaped(tied_values="no")),
    ("negative blocks", DESCRIPTION_FILE, shaped(blocks=-1)),
    ("another dimension", WEIGHTS_FILE, shaped(dim=24)),
    ("a dimension that no machine holds", WEIGHTS_FILE, shaped(dim=3 * 10**12)),
    ("another text dimension", WEIGHTS_FILE, shaped(content_dim=9)),
    ("fewer blocks", WEIGHTS_FILE, shaped(blocks=1)),
    ("more blocks", WEIGHTS_FILE, shaped(blocks=3)),
    ("more blocks than memory holds", WEIGHTS_FILE, shaped(blocks=10**12)),
    ("tied", WEIGHTS_FILE, shaped(tied_values=True)),
    ("a shape of more items", ITEMS_FILE, shaped(n_items=13)),
    ("a shape of more items than memory holds", ITEMS_FILE, shaped(n_items=10**15)),
    ("fewer ids", ITEMS_FILE, listed(*TWELVE[:-1])),
    ("an id twice", ITEMS_FILE, listed(*TWELVE[:-1], "i0")),
    ("an id that is a number", ITEMS_FILE, listed(*TWELVE[:-1], 7)),
    ("ids in an object", ITEMS_FILE, lambda _: json.dumps(dict.fromkeys(TWELVE, 1)).encode()),
    ("ids in a string", ITEMS_FILE, lambda _: b'"abcdefghijkl"'),
    ("ids that are null", ITEMS_FILE, lambda _: b"null"),
    ("a weight missing", WEIGHTS_FILE, weighed(lambda t: t.pop("item_norm.bias"))),
    ("a weight too many", WEIGHTS_FILE, weighed(lambda t: t.update(extra=torch.ones(1)))),
    (
        "a weight transposed",
        WEIGHTS_FILE,
        weighed(
            lambda t: t.update(
                {"content_projection.weight": t["content_projection.weight"].T.contiguous()}
            )
        ),
    ),
    ("a weight that is NaN", WEIGHTS_FILE, weighed(lambda t: t["item_norm.bias"].fill_(torch.nan))),
    (
        "one infinite weight",
        WEIGHTS_FILE,
        weighed(lambda t: t["id_embedding.weight"][3, 3:4].fill_(torch.inf)),
    ),
    (
        "whole numbers for weights",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({"item_norm.bias": t["item_norm.bias"].long()})),
    ),
    (
        "half precision",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({"item_norm.bias": t["item_norm.bias"].bfloat16()})),
    ),
    ("no events", WEIGHTS_FILE, weighed(lambda t: t.pop("item_counts"))),
    (
        "fewer events",
        WEIGHTS_FILE,
        weighed(lambda t: t.update(item_counts=t["item_counts"][:-1].clone())),
    ),
    (
        "events in fractions",
        WEIGHTS_FILE,
        weighed(lambda t: t.update(item_counts=t["item_counts"].bfloat16())),
    ),
    ("negative events", WEIGHTS_FILE, weighed(lambda t: t["item_counts"].neg_())),
    ("no counts of followers", WEIGHTS_FILE, weighed(lambda t: t.pop(SUMS))),
    ("no followers", WEIGHTS_FILE, weighed(lambda t: t.pop(FOLLOWERS))),
    (
        "followers of fewer items",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({name: t[name][:-1].clone() for name in (FOLLOWERS, SUMS)})),
    ),
    (
        "followers in fractions",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({FOLLOWERS: t[FOLLOWERS].float()})),
    ),
    (
        "wide followers",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({FOLLOWERS: t[FOLLOWERS].long()})),
    ),
    (
        "a follower that is no item",
        WEIGHTS_FILE,
        weighed(lambda t: t[FOLLOWERS][3, 1:2].fill_(13)),
    ),
    (
        "a follower before the first",
        WEIGHTS_FILE,
        weighed(lambda t: t[FOLLOWERS][3, 1:2].fill_(-1)),
    ),
    (
        "a follower less than never",
        WEIGHTS_FILE,
        weighed(lambda t: t[SUMS][3, 1:2].fill_(-0.5)),
    ),
    (
        "a follower that is NaN",
        WEIGHTS_FILE,
        weighed(lambda t: t[SUMS][3, 1:2].fill_(torch.nan)),
    ),
    ("fewer followers", WEIGHTS_FILE, shaped(transitions_per_item=4)),
    ("more followers than memory holds", WEIGHTS_FILE, shaped(transitions_per_item=10**15)),
    ("followers in words", DESCRIPTION_FILE, shaped(transitions_per_item="five")),
    ("no horizon", WEIGHTS_FILE, weighed(lambda t: t.pop(GAP))),
    (
        "a horizon in fractions",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({GAP: torch.tensor(0.5)})),
    ),
    (
        "a horizon before the event",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({GAP: torch.tensor(-1)})),
    ),
    (
        "a horizon after all time",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({GAP: torch.tensor(2**63 - 1)})),
    ),
    (
        "two horizons",
        WEIGHTS_FILE,
        weighed(lambda t: t.update({GAP: torch.tensor([1, 2])})),
    ),
]


@pytest.mark.parametrize(
    ("blamed", "corrupt"), [pytest.param(*rest, id=name) for name, *rest in MALFORMED]
)
def test_a_malformed_file_is_named(
    files: Files, blamed: str, corrupt: Callable[[Files], bytes]
) -> None:
    changed = corrupt(files)
    # A shape that does not fit is found by holding it against another file.
    place = DESCRIPTION_FILE if "shaped" in corrupt.__qualname__ else blamed
    with pytest.raises(ValueError, match=blamed):
        TrainedModel.from_files(files | {place: changed})


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 24},
        {"content_dim": 10**9},
        {"blocks": 3},
        {"blocks": 10**9},
        {"n_items": 10**9},
        {"transitions_per_item": 10**9},
        {"transitions_per_item": 6},
    ],
)
def test_shape_is_checked_before_the_model_is_built(
    files: Files, change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RecommenderConfig] = []
    monkeypatch.setattr("models.recommender.artifact.Recommender", made.append)
    with pytest.raises(ValueError, match=r"weights are not of the shape|ids, where the model has"):
        TrainedModel.from_files(files | {DESCRIPTION_FILE: shaped(**change)(files)})
    assert made == []


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_damage_is_a_value_error_or_nothing(files: Files, data: st.DataObject) -> None:
    """Files with random bytes changed load, or raise a ValueError that names a file."""
    name = data.draw(st.sampled_from([WEIGHTS_FILE, DESCRIPTION_FILE, ITEMS_FILE]))
    damaged = bytearray(files[name])
    # The header of the weights is a small part of them, and where damage matters most.
    end = data.draw(st.sampled_from([min(2_000, len(damaged)), len(damaged)]))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    try:
        TrainedModel.from_files(files | {name: bytes(damaged)})
    except ValueError as error:
        assert any(each in str(error) for each in files)  # noqa: PT017


def test_parts_that_do_not_fit_are_refused(made: TrainedModel) -> None:
    """A trained model refuses inconsistent ids, counts, event types or weights."""
    counts = made.item_counts
    with pytest.raises(ValueError, match="must agree"):
        TrainedModel(made.model, made.item_ids[:-1], counts, "fake", {})
    with pytest.raises(ValueError, match="must agree"):
        TrainedModel(made.model, made.item_ids, counts[:-1], "fake", {})
    with pytest.raises(ValueError, match="distinct"):
        TrainedModel(made.model, (*made.item_ids[:-1], "i0"), counts, "fake", {})
    told = random_model(1, **TOLD)
    for names, problem in (
        (("view", "dislike"), "2 event types, where the model has 3"),
        (("view", "dislike", "view"), "event_types must be distinct"),
        (("dislike", "view", "buy"), "the model's dislikes are of type 1, not 0"),
        (("view", "hate", "buy"), "the model's dislikes are of type 1, not -1"),
    ):
        with pytest.raises(ValueError, match=problem):
            TrainedModel(told, made.item_ids, counts, "fake", {}, names)
    broken = random_model(1)
    with torch.no_grad():
        broken.prior[3] = torch.nan
    with pytest.raises(ValueError, match=r"weight prior is not finite"):
        TrainedModel(broken, made.item_ids, counts, "fake", {})
    followed = random_model(1)
    followed.statistics.transition_items[2, 0] = 13
    with pytest.raises(ValueError, match=r"transition items must be in \[0, 12\]"):
        TrainedModel(followed, made.item_ids, counts, "fake", {})
    hasty = random_model(1)
    hasty.statistics.load(hasty.statistics.transition_counts, max_request_gap=-1)
    with pytest.raises(ValueError, match="max_request_gap must be in"):
        TrainedModel(hasty, made.item_ids, counts, "fake", {})


def test_weights_whose_sum_overflows_are_finite() -> None:
    large = random_model(1)
    with torch.no_grad():
        large.prior.fill_(3e38)
    TrainedModel(large, tuple(TWELVE), np.ones(12, np.int64), "fake", {})
    with torch.no_grad():
        large.prior[0], large.prior[1] = torch.inf, -torch.inf
    with pytest.raises(ValueError, match=r"weight prior is not finite"):
        TrainedModel(large, tuple(TWELVE), np.ones(12, np.int64), "fake", {})


def test_weights_are_views_of_the_bytes_that_were_read(files: Files) -> None:
    buffer = bytearray(files[WEIGHTS_FILE])
    model = TrainedModel.from_files({**files, WEIGHTS_FILE: buffer}).model
    first = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    wanted, state = load(files[WEIGHTS_FILE]), model.state_dict()
    wanted.pop("item_counts")
    assert state.keys() == wanted.keys()
    for name, weight in state.items():
        assert torch.equal(weight, wanted[name]), name
        assert first < weight.data_ptr() < first + len(buffer), name


def test_reading_draws_no_random_weights(files: Files) -> None:
    """Reading a model leaves torch's generator as it was: every weight comes from the files."""
    before = torch.get_rng_state()
    TrainedModel.from_files(files)
    assert torch.equal(torch.get_rng_state(), before)
