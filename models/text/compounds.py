"""Compounds, split and joined by the words of the catalogue: "cake stand" and "cakestand"."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from models.text.index_terms import IndexTerms

_MIN_PART = 3  # letters of the longer part of a compound; of a word that some item has, of both


class Compound(NamedTuple):
    """Another spelling of words of a query, which some item has.

    Attributes:
        text: one word, or two that stand side by side.
        weight: factor of its BM25 score.
    """

    text: str
    weight: float


def split_word(terms: IndexTerms, word: str) -> Compound | None:
    """Return the two words that a word is made of, where an item has them side by side.

    Of several ways to split it, the one whose rarer part is the most frequent. Where some item has
    the word itself, the two weigh what the one does.
    """
    is_known = terms.word_frequency(word) > 0
    best, most = None, 0
    for at in range(1, len(word)):
        pair = word[:at], word[at:]
        count = min(map(terms.word_frequency, pair))
        if count > most and _is_compound(terms, pair, is_known=is_known):
            best, most = pair, count
    if best is None:
        return None
    weight = terms.rarity(word) / sum(map(terms.rarity, best)) if is_known else 1.0
    return Compound(" ".join(best), weight)


def _is_compound(terms: IndexTerms, pair: tuple[str, str], *, is_known: bool) -> bool:
    """Whether two words that an item has side by side may be meant by one.

    Of a word that some item has, both parts are words apart from each other, and tell something:
    many a text breaks a word by mistake. Two short parts are none if either is a common word, for
    chance would make too many words of these.
    """
    common = any(map(terms.is_common, pair))
    if max(map(len, pair)) < _MIN_PART or (common and max(map(len, pair)) <= _MIN_PART):
        return False
    if is_known and (common or min(map(len, pair)) < _MIN_PART):
        return False
    together = terms.phrase_frequency(" ".join(pair))
    apart = [terms.word_frequency(part) > together for part in pair]
    return together > 0 and (not is_known or apart[0] == apart[1])


def joined_words(terms: IndexTerms, words: Sequence[str], total: int) -> list[Compound]:
    """Return the neighbours among words that an item writes as one word.

    In a query of these two words, the one word weighs twice what they do together, however frequent
    it is: encoders tell a compound from its parts. It weighs the less the longer the query is, of
    `total` words, for then the other words tell what is meant.
    """
    found = []
    for left, right in pairwise(words):
        whole = left + right
        if terms.word_frequency(whole):
            apart = terms.rarity(left) + terms.rarity(right)
            share = 2 / total
            found.append(Compound(whole, (share + share**2) * apart / terms.rarity(whole)))
    return found
