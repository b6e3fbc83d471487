"""A text encoder whose tokens are words, for tests of what stands in for a transformer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WIDTH = 16  # dimensions of its vectors
WORDS = [f"w{number}" for number in range(60)]


class TokenEncoder:
    """Encoder of the words of `WORDS`: the direction of the sum of hidden rows, one for each word.

    Other words are no tokens. `bend` adds what depends on the first word too, so that no table can
    imitate it exactly.
    """

    dimension, quick = WIDTH, False

    def __init__(self, seed: int = 0, bend: float = 0.0) -> None:
        self.name = f"token-encoder-{seed}-{bend:g}"
        self.vocabulary = ["", *WORDS]  # the first is a special token
        rng = np.random.default_rng(seed)
        lengths = rng.uniform(0.2, 2, size=(len(self.vocabulary), 1))
        self.hidden = rng.normal(size=(len(self.vocabulary), WIDTH)) * lengths
        self.bend = bend
        self.encoded: list[str] = []

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        ids = {word: at for at, word in enumerate(self.vocabulary)}
        return [[ids[word] for word in text.split() if word in ids] for text in texts]

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.encoded += texts
        out = np.zeros((len(texts), WIDTH), np.float32)
        for at, ids in enumerate(self.tokenize(texts)):
            if ids:
                total = self.hidden[ids].sum(axis=0) + self.bend * self.hidden[ids[0]][::-1]
                out[at] = total / np.linalg.norm(total)
        return out


def sentences(count: int, seed: int = 0, words: Sequence[str] = WORDS) -> list[str]:
    """Return texts of two to nine words at random."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(words, rng.integers(2, 10))) for _ in range(count)]
