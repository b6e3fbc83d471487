"""The softmax over field keys and keywords, compared with a float64 loop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from models.catalogue.catalogue import Catalogue
from models.catalogue.item_entry import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import AttentionOptions
from models.ranking.matching.field_matches import match_fields
from models.ranking.search import search, strong_matches
from models.ranking.search_parameters import DEFAULTS
from models.text.keywords import NO_KEYWORDS, WHOLE, KeywordHits
from tests.support.reference import cosine
from tests.support.small import DIMENSION, encode

ITEMS = 6
KEYWORDS = KeywordHits(
    np.array([1, 4, 5]), np.array([WHOLE, 0.5, -0.25], np.float32), ("item_id", "sku", "item_id")
)


def snapshot() -> Snapshot:
    """Five items with a title each, and one without any text."""
    entries = [ItemEntry(f"i{n}", fields={"title": f"title {n}"}) for n in range(ITEMS - 1)]
    made = Catalogue.empty(DIMENSION).updated([*entries, ItemEntry("bare")], [], encode)
    return Snapshot.build("v", None, made, np.zeros(ITEMS, np.int64))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_keywords_are_keys_of_the_same_softmax(temperature: float) -> None:
    """Weights, scores and shares of all items equal the loop, the item without a text included."""
    served, query = snapshot(), encode(["title 2"])[0]
    allowed = np.ones(ITEMS, np.bool_)
    options = AttentionOptions(temperature=temperature)
    matches = match_fields(served, query, allowed=allowed, options=options, keywords=KEYWORDS)
    scale = DEFAULTS.temperature * temperature
    # A factor of the softmax' temperature spares the biases, of which a title has none.
    logits = {
        (row, "title"): cosine(query.tolist(), vector.tolist()) / scale
        for row, vector in enumerate(encode([f"title {n}" for n in range(ITEMS - 1)]))
    }
    most = DEFAULTS.lexical + DEFAULTS.meaning
    logits[1, "item_id"] = (most + WHOLE) / scale
    logits[4, "sku"] = (most + 0.5) / scale
    logits[5, "item_id"] = DEFAULTS.lexical * 0.75 / scale
    total = math.fsum(map(math.exp, logits.values()))
    weights = {
        row: math.fsum(math.exp(logit) for (of, _), logit in logits.items() if of == row) / total
        for row in range(ITEMS)
    }
    found = search(matches, limit=ITEMS)
    assert found.rows.tolist() == sorted(weights, key=lambda row: -weights[row])
    for row, weight, score, matched in zip(
        found.rows.tolist(), found.weights, found.scores, found.matched, strict=True
    ):
        assert weight == pytest.approx(weights[row], rel=1e-4)
        assert score == pytest.approx(math.log(weights[row] * total), abs=1e-4)
        shares = {
            name: math.exp(logit) / total / weights[row]
            for (of, name), logit in logits.items()
            if of == row
        }
        assert matched == pytest.approx(shares, abs=1e-5)
    assert search(matches, limit=2).rows.tolist() == [1, 4]
    assert {1, 4, 5} <= set(strong_matches(matches, 1.0).tolist())


def test_a_lookup_returns_the_whole_keyword() -> None:
    """With `hard` the best keyword has all the weight."""
    query, allowed = encode(["title 2"])[0], np.ones(ITEMS, np.bool_)
    hard = AttentionOptions(hard=True)
    matches = match_fields(snapshot(), query, allowed=allowed, options=hard, keywords=KEYWORDS)
    found = search(matches, limit=ITEMS)
    assert (found.rows.tolist(), found.weights.tolist()) == ([1], [1.0])


def test_keywords_alone_are_found_without_a_query_vector() -> None:
    """A query without meaning finds its keywords and nothing else, and without those nothing."""
    nothing, allowed = np.zeros(DIMENSION, np.float32), np.ones(ITEMS, np.bool_)
    for keywords, rows in ((KEYWORDS, [1, 4, 5]), (NO_KEYWORDS, [])):
        matches = match_fields(snapshot(), nothing, allowed=allowed, keywords=keywords)
        assert search(matches, limit=ITEMS).rows.tolist() == rows
