"""Calibration of search: known answers for encoders that say nothing, and that say everything."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from models.ranking.matches import DEFAULTS
from models.text.encoders import StaticEncoder
from service.cli.console import open_store
from service.domain.errors import Invalid
from service.domain.records import Item
from service.maintenance.search_calibration import (
    MIN_QUERIES,
    WEIGHTS,
    build_snapshot,
    calibrate,
    choose_weight,
    hold_out_sentences,
    hold_out_titles,
    rank_by_weight,
)
from service.runtime.data_layout import SEARCH_FILE
from service.snapshots.live_search import (
    FittedParameters,
    load_search_parameters,
    save_search_parameters,
)
from service.snapshots.text_embeddings import EmbeddingCache
from tests.support.command_line import Heed

pytestmark = pytest.mark.verify

DIMENSION = 32
PRIOR = WEIGHTS.index(DEFAULTS.meaning)


class Noise:
    """Encoder whose vectors have nothing to do with the texts."""

    name, dimension, quick = "noise", DIMENSION, True

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        made = [np.random.default_rng([*text.encode()]).normal(size=DIMENSION) for text in texts]
        return np.array([each / np.linalg.norm(each) for each in made], np.float32)


class Oracle(Noise):
    """Encoder that knows the item of each text by the last digits in it."""

    name = "oracle"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return super().encode([re.findall(r"\d+", text)[-1] for text in texts])


def catalogue(count: int) -> list[Item]:
    """Items of random words that share some with their titles and many with each other's."""
    rng = np.random.default_rng(0)
    items = []
    for n in range(count):
        words = [f"w{word}" for word in rng.zipf(1.3, 60) % 3_000]
        title = " ".join([*words[:2], "z", str(n)])
        text = f"{' '.join(words[1:30])} {n}a. {' '.join(words[28:])} b{n}."
        items.append(Item(str(n), title=title, description=text))
    return items


# ---------------------------------------------------------------------------- the choice


def gains(*means: float) -> NDArray[np.float64]:
    """Gains [200, W] of these means, which differ by the same amount in every query."""
    rng = np.random.default_rng(0)
    return np.array(means) + rng.normal(scale=0.1, size=(200, 1))


def test_weight_stays_without_evidence() -> None:
    """Equal gains, and gains within a standard error, leave the default."""
    same = gains(*[0.5] * len(WEIGHTS))
    assert choose_weight(same) == DEFAULTS.meaning
    noisy = same + np.random.default_rng(1).normal(scale=0.1, size=same.shape)
    noisy[:, 0] -= 0.1
    noisy[:, PRIOR + 1] += 0.005  # a standard error is .01
    assert choose_weight(noisy) == DEFAULTS.meaning


def test_weight_falls_until_it_is_no_worse_than_words() -> None:
    """The largest weight up to the default that finds no less than words alone is chosen."""
    means = [0.5, 0.52, 0.5, 0.49, 0.48, 0.45] + [0.4] * (len(WEIGHTS) - PRIOR - 1)
    assert choose_weight(gains(*means)) == WEIGHTS[2]
    assert choose_weight(gains(0.5, *[0.49] * (len(WEIGHTS) - 1))) == 0


def test_weight_rises_while_it_finds_significantly_more() -> None:
    """The weight rises step by step and stops before the first step that gains nothing."""
    means = [0.4] * PRIOR + [0.5, 0.6, 0.7, 0.7, 0.9]
    assert choose_weight(gains(*means)) == WEIGHTS[PRIOR + 2]
    assert choose_weight(gains(*np.linspace(0, 1, len(WEIGHTS)))) == WEIGHTS[-1]


# ---------------------------------------------------------------------------- what is held out


def test_titles_are_held_out_of_all_items() -> None:
    """No item keeps its title; titles that a description repeats are no queries."""
    items = [
        Item("a", title='Jazz "piano"*', description="An evening."),
        Item("b", title="Blues, an evening", description="This is a BLUES an evening."),
        Item("c", title="Opera"),
        Item("d", title="...", description="A title without words."),
        Item("e", title="word " * 50_000, description="A title that is no query."),
    ]
    held = hold_out_titles(items, np.random.default_rng(0))
    assert [(item.item_id, item.title) for item in held.items] == [(i, "") for i in "abcde"]
    assert [(text.split(), of) for text, of in held.queries] == [(["Jazz", "piano"], "a")]


def test_a_sentence_is_held_out_of_its_own_item() -> None:
    """Each query was a sentence of its item, is gone there, and nothing else is."""
    long = " ".join(f"word{n}" for n in range(20))
    first, second = f"One {long}.", f"Two {long}!"
    items = [
        Item("a", title="A", description=f"{first} {second}"),
        Item("b", title="B", description="Only one sentence of any length."),
        Item("c", title="C", description="Too short. To hold out any."),
    ]
    held = hold_out_sentences(items, np.random.default_rng(0))
    ((text, of),) = held.queries
    assert of == "a"
    assert {text, held.items[0].description} == {first, second}
    assert held.items[1:] == items[1:]


# ---------------------------------------------------------------------------- the whole


def test_an_encoder_that_says_nothing_leaves_words_alone() -> None:
    """With random vectors nothing but words counts, and the ranking is that of BM25."""
    items, embeddings = catalogue(300), EmbeddingCache(Noise())
    found = calibrate(items, embeddings)
    assert found.parameters.meaning == 0
    assert found.mean(0.0) > found.mean(1.0) > found.mean(4.0)
    snapshot = build_snapshot(items, embeddings)
    index = snapshot.catalogue.bm25_index
    assert index is not None
    hits = index.search(index.parser.parse("w1 w2 w7"), 300, snapshot.catalogue.servable)
    scores = dict(zip(map(str, hits.rows.tolist()), hits.scores.tolist(), strict=True))
    words = rank_by_weight(snapshot, embeddings.query, "w1 w2 w7")[0][:20]
    # Some tie, in any order.
    assert [scores[item_id] for item_id in words] == pytest.approx(hits.scores[:20], rel=1e-5)


def test_an_encoder_that_says_everything_is_weighted_more() -> None:
    """With vectors that name the item, the weight rises above the default."""
    found = calibrate(catalogue(300), EmbeddingCache(Oracle()))
    assert found.parameters.meaning > DEFAULTS.meaning
    assert found.mean(found.parameters.meaning) > found.mean(DEFAULTS.meaning) > found.mean(0.0)


def test_gains_equal_a_loop_over_the_rankings() -> None:
    """The mean gain of words alone is that of the ranks that BM25 gives, in a plain loop."""
    items, embeddings = catalogue(120), EmbeddingCache(Noise())
    found = calibrate(items, embeddings)
    rng = np.random.default_rng(0)
    gained = []
    for hold_out in (hold_out_titles, hold_out_sentences):
        held = hold_out(items, rng)
        index = build_snapshot(held.items, embeddings, keywords=False).catalogue.bm25_index
        assert index is not None
        for text, item_id in held.queries:
            hits = index.search(index.parser.parse(text), 100, np.ones(len(items), np.bool_))
            ranks = [at for at, row in enumerate(hits.rows.tolist()) if str(row) == item_id]
            gained.append(1 / math.log2(2 + ranks[0]) if ranks else 0.0)
    assert len(gained) == len(found.gains)
    assert found.mean(0.0) == pytest.approx(sum(gained) / len(gained), abs=1e-3)


def test_hidden_items_are_neither_searched_nor_queries() -> None:
    """Hidden items leave too few queries, and the message counts the others'."""
    items = [Item(i.item_id, title=i.title, description=i.description, hidden=n >= MIN_QUERIES // 4)
             for n, i in enumerate(catalogue(200))]  # fmt: skip
    with pytest.raises(Invalid, match=f"^{MIN_QUERIES // 2} titles and sentences can be held out"):
        calibrate(items, EmbeddingCache(Noise()))


# ---------------------------------------------------------------------------- the commands


def write(path: Path, items: Sequence[Item]) -> Path:
    rows = [{"item_id": i.item_id, "title": i.title, "description": i.description} for i in items]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def test_an_import_calibrates_and_keeps_what_judgments_said(heed: Heed, tmp_path: Path) -> None:
    """`import` saves calibrated parameters, again for twice the items, never over judged ones."""
    search_file = tmp_path / "data" / SEARCH_FILE
    items = catalogue(320)
    said = heed("import", "items", write(tmp_path / "few.jsonl", items[:20]))
    assert said.code == 0, said.err
    assert not search_file.exists()
    said = heed("import", "items", write(tmp_path / "some.jsonl", items[:160]))
    assert "titles and sentences, held out, find their items" in said.out, said.err
    with open_store(tmp_path / "data") as store:
        expected = calibrate(store.scan_items(), EmbeddingCache(StaticEncoder()))
    assert load_search_parameters(search_file, StaticEncoder.name) == expected.parameters
    said = heed("import", "items", write(tmp_path / "more.jsonl", items[:319]))
    assert (said.code, "held out" in said.out) == (0, False)
    said = heed("import", "items", write(tmp_path / "all.jsonl", items))
    assert (said.code, "held out" in said.out) == (0, True)
    search_file.unlink()
    save_search_parameters(search_file, StaticEncoder.name, FittedParameters(DEFAULTS))
    before = search_file.read_bytes()
    heed("import", "items", write(tmp_path / "again.jsonl", items))
    assert search_file.read_bytes() == before


def test_tune_search_without_judgments_calibrates(heed: Heed, tmp_path: Path) -> None:
    """`tune-search` alone calibrates to the stored items, and says when they are too few."""
    heed("import", "items", write(tmp_path / "few.jsonl", catalogue(10)))
    said = heed("tune-search")
    assert (said.code, "too few to calibrate" in said.err) == (1, True)
    items = catalogue(150)
    heed("import", "items", write(tmp_path / "items.jsonl", items))
    search_file = tmp_path / "data" / SEARCH_FILE
    first = search_file.read_bytes()
    search_file.unlink()
    said = heed("tune-search")
    assert (said.code, "by words alone" in said.out) == (0, True), said.err
    assert search_file.read_bytes() == first
