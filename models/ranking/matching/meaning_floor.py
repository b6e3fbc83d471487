"""Floor of meaning: the cosine that a query without a known word must reach to find anything.

Any text has a nearest key, nonsense too, and how near depends on the encoder, the number of keys
and their lengths. So nonsense is compared with a sample of the catalogue's own keys:

    floor = the largest of its best cosines + `MARGIN` standard deviations of them

The margin is for nonsense that comes nearer by chance than that which was drawn.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from models.catalogue.field_keys import FieldKeys

SAMPLES = 256  # strings of nonsense
MARGIN = 4.0
MAX_FLOOR = 0.95  # that a text which nearly repeats a key passes anywhere
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"

EncodeQuery = Callable[[str], NDArray[np.float32]]


def meaning_floor(keys: FieldKeys, encode: EncodeQuery) -> float:
    """Return the floor of the best cosine of a query, among the keys of a catalogue.

    Args:
        keys: of the catalogue; a sample of many is compared.
        encode: encodes a query to its vector [D].
    """
    vectors = keys.sample()[1]
    if not len(vectors):
        return MAX_FLOOR
    best = (nonsense_vectors(encode) @ vectors.T).max(axis=1)
    return min(MAX_FLOOR, float(best.max() + MARGIN * best.std()))


@lru_cache(4)  # setups of search of a process; tests have their own
def nonsense_vectors(encode: EncodeQuery) -> NDArray[np.float32]:
    """Return the vectors [SAMPLES, D] of nonsense, the same at every call."""
    return np.stack([encode(text) for text in nonsense(SAMPLES)])


def nonsense(count: int, seed: int = 0) -> list[str]:
    """Return strings of one or two words, half of them such as can be pronounced."""
    rng = random.Random(seed)

    def word() -> str:
        letters = range(rng.randint(4, 12))
        if rng.random() < 0.5:
            return "".join(rng.choice(string.ascii_lowercase) for _ in letters)
        return "".join(rng.choice(_VOWELS if at % 2 else _CONSONANTS) for at in letters)

    return [" ".join(word() for _ in range(rng.randint(1, 2))) for _ in range(count)]
