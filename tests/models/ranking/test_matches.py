"""Keywords in the softmax of search, and the floor of meaning."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest

from models.attention.attend import AttentionOptions
from models.catalogue.catalogue import Catalogue
from models.catalogue.field_keys import FieldKeys
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.ranking.matches import (
    DEFAULTS,
    MAX_FLOOR,
    SAMPLES,
    match_fields,
    meaning_floor,
    nonsense,
)
from models.ranking.search import search, strong_matches
from models.ranking.steering import ItemSteering
from models.text.encoders import StaticEncoder
from models.text.terms import NO_KEYWORDS, WHOLE, KeywordHits
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
    assert {1, 4, 5} <= set(strong_matches(matches).tolist())


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


@pytest.mark.parametrize("options", [{}, {"temperature": 4.0}, {"hard": True}])
def test_boosts_order_keywords_and_texts_alike(options: dict[str, Any]) -> None:
    """Steered results have the weights, scores and shares of plain ones, ordered with boosts."""
    served, query = snapshot(), encode(["title 2"])[0]
    matches = match_fields(
        served,
        query,
        allowed=np.ones(ITEMS, np.bool_),
        options=AttentionOptions(**options),
        keywords=KEYWORDS,
    )
    personal = np.linspace(-1, 2, ITEMS, dtype=np.float32)
    plain = search(matches, limit=ITEMS, personal=personal)
    boost = np.array([5, 0, -3, 60, 0, 1], np.float32)
    buried = np.arange(ITEMS) == 1
    steered = search(
        matches,
        limit=ITEMS,
        personal=personal,
        steering=ItemSteering(boost=boost, buried=buried),
    )
    assert plain.personal is not None
    assert steered.personal is not None
    rows = plain.rows.tolist()
    wanted = sorted(rows, key=lambda r: -(plain.scores[rows.index(r)] + boost[r]))
    wanted.sort(key=lambda row: bool(buried[row]))
    assert steered.rows.tolist() == wanted
    assert len(wanted) == (1 if options.get("hard") else ITEMS)
    at = [rows.index(row) for row in wanted]
    assert steered.scores.tolist() == pytest.approx(plain.scores[at].tolist(), abs=1e-5)
    assert steered.weights.tolist() == pytest.approx(plain.weights[at].tolist(), abs=1e-6)
    assert steered.personal.tolist() == pytest.approx(plain.personal[at].tolist(), abs=1e-5)
    assert list(steered.matched) == [plain.matched[place] for place in at]
    few = search(matches, limit=2, personal=personal, steering=ItemSteering(boost=boost))
    order = sorted(rows, key=lambda r: -(plain.scores[rows.index(r)] + boost[r]))
    assert few.rows.tolist() == order[:2]


def test_the_memory_adds_to_texts_alone() -> None:
    """What a memory adds to a score is the difference to the score without it, keywords or not."""
    served, query = snapshot(), encode(["title 2"])[0]
    allowed = np.ones(ITEMS, np.bool_)
    matches = match_fields(served, query, allowed=allowed, keywords=KEYWORDS)
    personal = np.linspace(-1, 2, ITEMS, dtype=np.float32)
    plain, moved = search(matches, limit=ITEMS), search(matches, limit=ITEMS, personal=personal)
    before = dict(zip(plain.rows.tolist(), plain.scores.tolist(), strict=True))
    assert plain.personal is None
    assert moved.personal is not None
    for row, score, added in zip(
        moved.rows.tolist(), moved.scores.tolist(), moved.personal.tolist(), strict=True
    ):
        assert score - added == pytest.approx(before[row], abs=1e-4)
    assert moved.personal[moved.rows.tolist().index(5)] == 0  # it has no text


ENCODER = StaticEncoder()
TEXT = """
anchor balcony basket blanket bottle bridge bucket butter candle carpet castle cheese clover coffee
copper curtain desert dinner engine feather flower forest garden guitar hammer honey jacket kettle
ladder lantern lemon market mirror museum needle orchard paper pepper pillow planet pocket rabbit
ribbon saddle silver station storm summer teapot ticket tunnel umbrella valley village window
"""
WORDS = TEXT.split()


def keys(items: int) -> FieldKeys:
    """The keys of items with titles of one to four words."""
    rng = random.Random(items)
    entries = [
        ItemEntry(str(n), fields={"title": " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))})
        for n in range(items)
    ]
    return Catalogue.empty(ENCODER.dimension).updated(entries, [], ENCODER.encode).keys


@pytest.mark.parametrize("items", [10, 300, 5_000])
def test_nonsense_is_below_the_floor(items: int) -> None:
    """Of 1,000 strings that the floor was not made of at most one reaches it."""
    own = keys(items)
    floor = meaning_floor(own, lambda text: ENCODER.encode([text])[0])
    strange = ENCODER.encode(nonsense(1_000, seed=1))
    assert floor <= MAX_FLOOR
    assert np.count_nonzero((strange @ own.vectors.T).max(axis=1) >= floor) <= 1


def test_floor_is_four_deviations_above_the_nearest_nonsense() -> None:
    """The floor equals a loop over the strings and the keys."""
    own = keys(50)
    best = [
        max(float(np.dot(vector, key)) for key in own.vectors.astype(np.float64))
        for vector in ENCODER.encode(nonsense(SAMPLES)).astype(np.float64)
    ]
    floor = meaning_floor(own, lambda text: ENCODER.encode([text])[0])
    assert floor == pytest.approx(max(best) + 4 * statistics.pstdev(best), abs=1e-5)


def test_an_empty_catalogue_has_the_highest_floor() -> None:
    """Without keys nothing can be near."""
    empty = FieldKeys.empty(ENCODER.dimension)
    assert meaning_floor(empty, lambda text: ENCODER.encode([text])[0]) == MAX_FLOOR
