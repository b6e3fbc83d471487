"""The study of search weights: variants of texts, and weights of other collections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.ranking.search_parameters import DEFAULTS
from models.text.static_encoder import StaticEncoder
from service.datasets.public.collections import open_collection
from service.domain.records import Item
from service.evaluation.search_calibration import WEIGHTS
from service.evaluation.search_quality import build_snapshot, evaluate_search
from service.snapshots.text_embeddings import EmbeddingCache
from tests.benchmarks.studies.search_weights import VARIANTS, Measured, left_out, measure
from tests.support.judged import beir


def test_variants_change_the_texts_as_they_say() -> None:
    """Each variant gives the texts that its name says; an item without a description its title."""
    long = " ".join(str(n) for n in range(30))
    item = Item("a", title="A title", description=f"One. Two {long}.")
    texts = {name: (change(item).title, change(item).description)
             for name, change in VARIANTS.items()}  # fmt: skip
    assert texts["as is"] == ("A title", f"One. Two {long}.")
    assert texts["capitals"] == ("A TITLE", f"ONE. TWO {long}.")
    assert texts["no titles"] == ("", f"One. Two {long}.")
    assert texts["first sentence"] == ("", "One.")
    assert [len(texts[f"first {n} words"][1].split()) for n in (20, 12)] == [20, 12]
    assert VARIANTS["first sentence"](Item("b", title="Only this")).description == "Only this"


def test_a_collection_is_searched_in_every_variant(tmp_path: Path) -> None:
    """Words, meaning and both are as `evaluate_search` has them; few texts leave the default."""
    documents = {"a": ("violin", "wood and strings"), "b": ("bread", "flour, wood ash and heat"),
                 "c": ("cello", "large strings")}  # fmt: skip
    grades = [("1", "a", 1), ("2", "b", 2), ("2", "c", 1)]
    folder = beir(tmp_path / "small", documents, {"1": "violin", "2": "wood strings"}, grades)
    source = open_collection(folder, "test")
    items, judged = list(source.items()), source.judged_queries()
    embeddings = EmbeddingCache(StaticEncoder())
    found = {each.variant: each for each in measure("small", items, judged, embeddings)}
    assert found.keys() == VARIANTS.keys()
    snapshot, plain = build_snapshot(items, embeddings), found["as is"]
    words, meaning, both = (
        evaluate_search(snapshot, embeddings.query, judged, mode).ndcg.mean()
        for mode in ("BM25 alone", "meaning alone", "both")
    )
    assert 0 < words < 1
    assert plain.by_weight[0] == pytest.approx(words)
    assert plain.by_weight[WEIGHTS.index(DEFAULTS.meaning)] == pytest.approx(both)
    assert plain.meaning == pytest.approx(meaning)
    assert {each.calibrated for each in found.values()} == {DEFAULTS.meaning}
    assert found["no titles"].by_weight[0] < plain.by_weight[0]  # nothing else says violin


def test_the_weight_of_the_others_counts_each_collection_once() -> None:
    """The others' weight is the best of the mean over collections, not over variants."""
    first, last = np.eye(len(WEIGHTS))[[0, -1]]
    measured = [
        Measured("many", "as is", 0.0, first, 1.0),
        Measured("many", "capitals", 0.0, first, 1.0),
        Measured("one", "as is", 0.0, 1.5 * last, 1.0),
        Measured("own", "as is", 0.0, 9 * first, 1.0),
    ]
    assert left_out(measured, "own") == WEIGHTS[-1]
    assert left_out(measured, "one") == WEIGHTS[0]
    with pytest.raises(ValueError, match="no collection beside many"):
        left_out(measured[:2], "many")
