"""Trained models: what is kept in files comes back bit for bit, and damage is named."""

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

from models.recommender.artifact import DESCRIPTION, ITEMS, WEIGHTS, Trained
from models.recommender.config import RecommenderConfig
from tests.support.small import TOLD, random_model, trained

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def made() -> Trained:
    return trained(random_model(1))


@pytest.fixture(scope="module")
def files(made: Trained) -> Files:
    return made.pack()


@pytest.mark.parametrize(
    "shape", [{}, {"tied": True}, {"blocks": 0}, {"items": 0}, {"followers": 0}, {"followers": 30},
     TOLD, {"baskets": True, "again": True}],
)  # fmt: skip
def test_what_is_packed_comes_back_bit_for_bit(shape: dict[str, Any]) -> None:
    """Weights, followers, shape, ids, counts, encoder and metadata, whatever the shape."""
    before = trained(random_model(2, **shape))
    after = Trained.unpack(before.pack())
    state = after.model.state_dict()
    assert state.keys() == before.model.state_dict().keys()
    for name, weight in before.model.state_dict().items():
        assert weight.numpy().tobytes() == state[name].numpy().tobytes()
        assert state[name].dtype == weight.dtype
    assert after.model.config == before.model.config
    assert not after.model.training
    assert after.item_ids == before.item_ids
    assert after.counts.dtype == np.int64
    np.testing.assert_array_equal(after.counts, before.counts)
    assert (after.encoder, dict(after.metadata)) == ("fake", {"note": "small"})
    assert after.types == before.types
    assert len(after.types) == before.model.config.types


def test_packing_repeats() -> None:
    """The same model gives the same bytes, also after a round trip."""
    first = trained(random_model(3)).pack()
    assert trained(random_model(3)).pack() == first
    assert Trained.unpack(first).pack() == first


def test_any_id_survives() -> None:
    """Ids are any text: other scripts, quotes, what looks like a number."""
    ids = ("東京", 'a "quoted" id', "007", "ok\n", "😀", "a/b")
    model = random_model(1, items=len(ids))
    packed = Trained(model, ids, np.ones(6, np.int64), "fake", {}).pack()
    assert Trained.unpack(packed).item_ids == ids


def test_files_hold_no_pickle_and_run_nothing(made: Trained, files: Files, tmp_path: Path) -> None:
    """Nothing packed is a pickle; a pickle in place of a file is refused without being opened."""
    marker = tmp_path / "ran"

    class Poison:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    poison = pickle.dumps(Poison())
    for name, content in files.items():
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError)):
            pickle.loads(content)
        with pytest.raises(ValueError, match=name):
            Trained.unpack(files | {name: poison})
    assert not marker.exists()
    pickle.loads(poison)
    assert marker.exists()  # so the poison was one


@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION, ITEMS])
def test_a_missing_file_is_named(files: Files, name: str) -> None:
    """Each of the three is needed."""
    with pytest.raises(ValueError, match=f"{name} is missing"):
        Trained.unpack({k: v for k, v in files.items() if k != name})


def described(change: Mapping[str, Any]) -> Callable[[Files], bytes]:
    """The description with some members changed; None takes one away."""

    def corrupt(files: Files) -> bytes:
        description = json.loads(files[DESCRIPTION]) | change
        return json.dumps({k: v for k, v in description.items() if v is not None}).encode()

    return corrupt


def shaped(**change: Any) -> Callable[[Files], bytes]:
    """The description with a changed shape of the model."""

    def corrupt(files: Files) -> bytes:
        description = json.loads(files[DESCRIPTION])
        description["config"] |= change
        return json.dumps(description).encode()

    return corrupt


def weighed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Files], bytes]:
    """The weights with something changed."""

    def corrupt(files: Files) -> bytes:
        tensors = load(files[WEIGHTS])
        change(tensors)
        return save(tensors)

    return corrupt


def cut(name: str, share: float) -> Callable[[Files], bytes]:
    return lambda files: files[name][: int(share * len(files[name]))]


def listed(*ids: object) -> Callable[[Files], bytes]:
    return lambda _: json.dumps(ids).encode()


TWELVE = [f"i{n}" for n in range(12)]

MALFORMED: list[tuple[str, str, Callable[[Files], bytes]]] = [
    *((f"{name}: {share} of it", name, cut(name, share))
      for name in (WEIGHTS, DESCRIPTION, ITEMS) for share in (0, 0.5, 0.99)),
    ("not JSON", DESCRIPTION, lambda _: b"\xff\xfe"),
    ("deep JSON", DESCRIPTION, lambda _: b"[" * 100_000),
    ("a list", DESCRIPTION, lambda _: b"[]"),
    ("another format", DESCRIPTION, described({"format": 99})),
    ("no format", DESCRIPTION, described({"format": None})),
    ("no shape", DESCRIPTION, described({"config": None})),
    ("a shape that is no object", DESCRIPTION, described({"config": [1]})),
    ("no encoder", DESCRIPTION, described({"encoder": None})),
    ("an encoder that is no name", DESCRIPTION, described({"encoder": ["fake"]})),
    ("a format before types", DESCRIPTION, described({"format": 2})),
    ("no types", DESCRIPTION, described({"types": None})),
    ("types in a string", DESCRIPTION, described({"types": "v"})),
    ("a type that is a number", DESCRIPTION, described({"types": [7]})),
    ("more names of types", DESCRIPTION, described({"types": ["view", "purchase"]})),
    ("more types than names", DESCRIPTION, shaped(types=10**12)),
    ("types in words", DESCRIPTION, shaped(types="two")),
    ("a dislike that is no type", DESCRIPTION, shaped(dislike=1)),
    ("heads for dislikes there are none of", DESCRIPTION, shaped(dislike_heads=1)),
    ("metadata that is no object", DESCRIPTION, described({"metadata": 3})),
    ("an unknown member of the shape", DESCRIPTION, shaped(depth=3)),
    ("heads that do not divide", DESCRIPTION, shaped(heads=5)),
    ("no heads", DESCRIPTION, shaped(heads=0)),
    ("a fractional dimension", DESCRIPTION, shaped(dim=1.5)),
    ("a dimension in words", DESCRIPTION, shaped(dim="twelve")),
    ("negative dimension", DESCRIPTION, shaped(dim=-12)),
    ("impossible dropout", DESCRIPTION, shaped(dropout="much")),
    ("dropout above one", DESCRIPTION, shaped(dropout=1.5)),
    ("tied in words", DESCRIPTION, shaped(tied="no")),
    ("negative blocks", DESCRIPTION, shaped(blocks=-1)),
    ("another dimension", WEIGHTS, shaped(dim=24)),
    ("a dimension that no machine holds", WEIGHTS, shaped(dim=3 * 10**12)),
    ("another text dimension", WEIGHTS, shaped(content=9)),
    ("fewer blocks", WEIGHTS, shaped(blocks=1)),
    ("more blocks", WEIGHTS, shaped(blocks=3)),
    ("more blocks than memory holds", WEIGHTS, shaped(blocks=10**12)),
    ("tied", WEIGHTS, shaped(tied=True)),
    ("a shape of more items", ITEMS, shaped(items=13)),
    ("a shape of more items than memory holds", ITEMS, shaped(items=10**15)),
    ("fewer ids", ITEMS, listed(*TWELVE[:-1])),
    ("an id twice", ITEMS, listed(*TWELVE[:-1], "i0")),
    ("an id that is a number", ITEMS, listed(*TWELVE[:-1], 7)),
    ("ids in an object", ITEMS, lambda _: json.dumps(dict.fromkeys(TWELVE, 1)).encode()),
    ("ids in a string", ITEMS, lambda _: b'"abcdefghijkl"'),
    ("ids that are null", ITEMS, lambda _: b"null"),
    ("a weight missing", WEIGHTS, weighed(lambda t: t.pop("norm.bias"))),
    ("a weight too many", WEIGHTS, weighed(lambda t: t.update(extra=torch.ones(1)))),
    ("a weight transposed", WEIGHTS, weighed(
        lambda t: t.update({"content.weight": t["content.weight"].T.contiguous()}))),
    ("a weight that is NaN", WEIGHTS, weighed(lambda t: t["norm.bias"].fill_(torch.nan))),
    ("one infinite weight", WEIGHTS, weighed(lambda t: t["ids.weight"][3, 3:4].fill_(torch.inf))),
    ("whole numbers for weights", WEIGHTS, weighed(
        lambda t: t.update({"norm.bias": t["norm.bias"].long()}))),
    ("half precision", WEIGHTS, weighed(
        lambda t: t.update({"norm.bias": t["norm.bias"].bfloat16()}))),
    ("no events", WEIGHTS, weighed(lambda t: t.pop("events"))),
    ("fewer events", WEIGHTS, weighed(lambda t: t.update(events=t["events"][:-1].clone()))),
    ("events in fractions", WEIGHTS, weighed(lambda t: t.update(events=t["events"].bfloat16()))),
    ("negative events", WEIGHTS, weighed(lambda t: t["events"].neg_())),
    ("no counts of followers", WEIGHTS, weighed(lambda t: t.pop("counts"))),
    ("no followers", WEIGHTS, weighed(lambda t: t.pop("columns"))),
    ("followers of fewer items", WEIGHTS, weighed(
        lambda t: t.update(columns=t["columns"][:-1].clone(), counts=t["counts"][:-1].clone()))),
    ("followers in fractions", WEIGHTS, weighed(lambda t: t.update(columns=t["columns"].float()))),
    ("wide followers", WEIGHTS, weighed(lambda t: t.update(columns=t["columns"].long()))),
    ("a follower that is no item", WEIGHTS, weighed(lambda t: t["columns"][3, 1:2].fill_(13))),
    ("a follower before the first", WEIGHTS, weighed(lambda t: t["columns"][3, 1:2].fill_(-1))),
    ("a follower less than never", WEIGHTS, weighed(lambda t: t["counts"][3, 1:2].fill_(-0.5))),
    ("a follower that is NaN", WEIGHTS, weighed(lambda t: t["counts"][3, 1:2].fill_(torch.nan))),
    ("fewer followers", WEIGHTS, shaped(followers=4)),
    ("more followers than memory holds", WEIGHTS, shaped(followers=10**15)),
    ("followers in words", DESCRIPTION, shaped(followers="five")),
    ("no horizon", WEIGHTS, weighed(lambda t: t.pop("horizon"))),
    ("a horizon in fractions", WEIGHTS, weighed(lambda t: t.update(horizon=torch.tensor(0.5)))),
    ("a horizon before the event", WEIGHTS, weighed(
        lambda t: t.update(horizon=torch.tensor(-1)))),
    ("a horizon after all time", WEIGHTS, weighed(
        lambda t: t.update(horizon=torch.tensor(2**63 - 1)))),
    ("two horizons", WEIGHTS, weighed(lambda t: t.update(horizon=torch.tensor([1, 2])))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("blamed", "corrupt"), [pytest.param(*rest, id=name) for name, *rest in MALFORMED]
)
def test_a_malformed_file_is_named(
    files: Files, blamed: str, corrupt: Callable[[Files], bytes]
) -> None:
    """Whatever is wrong is a ValueError that names the file, before any memory is taken for it."""
    changed = corrupt(files)
    # A shape that does not fit is found by holding it against another file.
    place = DESCRIPTION if "shaped" in corrupt.__qualname__ else blamed
    with pytest.raises(ValueError, match=blamed):
        Trained.unpack(files | {place: changed})


@pytest.mark.parametrize(
    "change",
    [{"dim": 24}, {"content": 10**9}, {"blocks": 3}, {"blocks": 10**9}, {"items": 10**9},
     {"followers": 10**9}, {"followers": 6}],
)  # fmt: skip
def test_no_model_is_made_of_a_shape_that_the_weights_have_not(
    files: Files, change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description may claim any size: it is held against the weights before memory is taken."""
    made: list[RecommenderConfig] = []
    monkeypatch.setattr("models.recommender.artifact.Recommender", made.append)
    with pytest.raises(ValueError, match=r"weights are not of the shape|ids, where the model has"):
        Trained.unpack(files | {DESCRIPTION: shaped(**change)(files)})
    assert made == []


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_damage_is_a_value_error_or_nothing(files: Files, data: st.DataObject) -> None:
    """Any bytes changed anywhere: another model, or a ValueError that names a file; never more."""
    name = data.draw(st.sampled_from([WEIGHTS, DESCRIPTION, ITEMS]))
    damaged = bytearray(files[name])
    # The header of the weights is a small part of them, and where damage matters most.
    end = data.draw(st.sampled_from([min(2_000, len(damaged)), len(damaged)]))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    try:
        Trained.unpack(files | {name: bytes(damaged)})
    except ValueError as error:
        assert any(each in str(error) for each in files)  # noqa: PT017


def test_parts_that_do_not_fit_are_refused(made: Trained) -> None:
    """Also when no file is involved."""
    counts = made.counts
    with pytest.raises(ValueError, match="must agree"):
        Trained(made.model, made.item_ids[:-1], counts, "fake", {})
    with pytest.raises(ValueError, match="must agree"):
        Trained(made.model, made.item_ids, counts[:-1], "fake", {})
    with pytest.raises(ValueError, match="distinct"):
        Trained(made.model, (*made.item_ids[:-1], "i0"), counts, "fake", {})
    told = random_model(1, **TOLD)
    for names, problem in (
        (("view", "dislike"), "2 names of types, where the model has 3"),
        (("view", "dislike", "view"), "types must be distinct"),
        (("dislike", "view", "buy"), "the model's dislikes are of type 1, not 0"),
        (("view", "hate", "buy"), "the model's dislikes are of type 1, not -1"),
    ):
        with pytest.raises(ValueError, match=problem):
            Trained(told, made.item_ids, counts, "fake", {}, names)
    broken = random_model(1)
    with torch.no_grad():
        broken.prior[3] = torch.nan
    with pytest.raises(ValueError, match=r"weight prior is not finite"):
        Trained(broken, made.item_ids, counts, "fake", {})
    followed = random_model(1)
    followed.columns[2, 0] = 13
    with pytest.raises(ValueError, match="followers must be rows of 12 items"):
        Trained(followed, made.item_ids, counts, "fake", {})
    hasty = random_model(1)
    hasty.memorise(hasty.followers, horizon=-1)
    with pytest.raises(ValueError, match="the horizon must be in"):
        Trained(hasty, made.item_ids, counts, "fake", {})


def test_the_default_shape_is_one_that_can_be_packed() -> None:
    """A model of the shape that training gives by default makes the round trip."""
    model = random_model(5, **RecommenderConfig(items=3).as_dict())
    assert Trained.unpack(trained(model).pack()).model.config == RecommenderConfig(items=3)
