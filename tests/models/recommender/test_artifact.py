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


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Files], bytes]:
    """Return a function that replaces a tensor of the weights file."""
    return weighed(lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))


def entry(name: str, value: float) -> Callable[[Files], bytes]:
    """Return a function that changes one entry of a matrix of the weights file."""
    return weighed(lambda tensors: tensors[name][3, 1:2].fill_(value))


MALFORMED: dict[str, dict[str, Callable[[Files], bytes]]] = {
    DESCRIPTION_FILE: {
        **{f"{share} of it": cut(DESCRIPTION_FILE, share) for share in (0, 0.5, 0.99)},
        "not JSON": lambda _: b"\xff\xfe",
        "deep JSON": lambda _: b"[" * 100_000,
        "a list": lambda _: b"[]",
        "another format": described({"format": 99}),
        "no format": described({"format": None}),
        "a format before states of events": described({"format": 4}),
        "no shape": described({"config": None}),
        "a shape that is no object": described({"config": [1]}),
        "an unknown member of the shape": shaped(depth=3),
        "an encoder that is no name": described({"text_encoder": ["fake"]}),
        "types in a string": described({"event_types": "v"}),
        "a type that is a number": described({"event_types": [7]}),
        "more names of types": described({"event_types": ["view", "purchase"]}),
        "more types than names": shaped(n_event_types=10**12),
        "a dislike that is no type": shaped(dislike_type=1),
        "metadata that is no object": described({"metadata": 3}),
        "a fractional dimension": shaped(dim=1.5),
    },
    ITEMS_FILE: {
        **{f"{share} of it": cut(ITEMS_FILE, share) for share in (0, 0.5, 0.99)},
        "a shape of more items": shaped(n_items=13),
        "fewer ids": listed(*TWELVE[:-1]),
        "an id twice": listed(*TWELVE[:-1], "i0"),
        "an id that is a number": listed(*TWELVE[:-1], 7),
        "ids in an object": lambda _: json.dumps(dict.fromkeys(TWELVE, 1)).encode(),
        "ids that are null": lambda _: b"null",
    },
    WEIGHTS_FILE: {
        **{f"{share} of it": cut(WEIGHTS_FILE, share) for share in (0, 0.5, 0.99)},
        "more heads than memory holds": shaped(attention_heads=10**12),
        "another dimension": shaped(dim=24),
        "another text dimension": shaped(content_dim=9),
        "fewer blocks": shaped(blocks=1),
        "more blocks than memory holds": shaped(blocks=10**12),
        "tied": shaped(tied_values=True),
        "a weight missing": weighed(lambda t: t.pop("item_norm.bias")),
        "a weight too many": weighed(lambda t: t.update(extra=torch.ones(1))),
        "a weight transposed": changed("content_projection.weight", lambda w: w.T),
        "a weight that is NaN": weighed(lambda t: t["item_norm.bias"].fill_(torch.nan)),
        "one infinite weight": entry("id_embedding.weight", torch.inf),
        "half precision": changed("item_norm.bias", torch.Tensor.bfloat16),
        "no events": weighed(lambda t: t.pop("item_counts")),
        "fewer events": changed("item_counts", lambda counts: counts[:-1]),
        "events in fractions": changed("item_counts", torch.Tensor.float),
        "negative events": weighed(lambda t: t["item_counts"].neg_()),
        "no followers": weighed(lambda t: t.pop(FOLLOWERS)),
        "followers of fewer items": changed(FOLLOWERS, lambda items: items[:-1]),
        "wide followers": changed(FOLLOWERS, torch.Tensor.long),
        "a follower that is no item": entry(FOLLOWERS, 13),
        "a follower before the first": entry(FOLLOWERS, -1),
        "a follower less than never": entry(SUMS, -0.5),
        "more followers than memory holds": shaped(transitions_per_item=10**15),
        "no horizon": weighed(lambda t: t.pop(GAP)),
        "a horizon before the event": changed(GAP, lambda _: torch.tensor(-1)),
        "a horizon after all time": changed(GAP, lambda _: torch.tensor(2**63 - 1)),
        "two horizons": changed(GAP, lambda _: torch.tensor([1, 2])),
    },
}


@pytest.mark.parametrize(
    ("blamed", "name"), [(blamed, name) for blamed, names in MALFORMED.items() for name in names]
)
def test_a_malformed_file_is_named(files: Files, blamed: str, name: str) -> None:
    corrupt = MALFORMED[blamed][name]
    # A shape that does not fit is found by holding it against another file.
    place = DESCRIPTION_FILE if "shaped" in corrupt.__qualname__ else blamed
    with pytest.raises(ValueError, match=blamed):
        TrainedModel.from_files(files | {place: corrupt(files)})


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
    counts = made.item_counts
    for ids, events in ((made.item_ids[:-1], counts), (made.item_ids, counts[:-1])):
        with pytest.raises(ValueError, match="must agree"):
            TrainedModel(made.model, ids, events, "fake", {})
    told = random_model(1, **TOLD)
    for names, problem in (
        (("view", "dislike"), "2 event types, where the model has 3"),
        (("view", "dislike", "view"), "event_types must be distinct"),
        (("dislike", "view", "buy"), "the model's dislikes are of type 1, not 0"),
        (("view", "hate", "buy"), "the model's dislikes are of type 1, not -1"),
    ):
        with pytest.raises(ValueError, match=problem):
            TrainedModel(told, made.item_ids, counts, "fake", {}, names)


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
