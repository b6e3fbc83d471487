"""The floor of meaning on catalogues of ten items and of thousands."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from models.catalogue.catalogue import Catalogue
from models.catalogue.field_keys import FieldKeys
from models.catalogue.item_entry import ItemEntry
from models.ranking.matching import MAX_FLOOR, SAMPLES, meaning_floor, nonsense
from models.text.static_encoder import StaticEncoder

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
