"""Compounds, split and joined by the words of the catalogue: "cake stand" and "cakestand".

A number and its unit are one too, whatever their lengths: "32 GB" and "32GB", "B 12" and "B12".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from models.text.index_terms import STOP_WORDS, IndexTerms

_MIN_PART = 3  # letters of the longer part of a compound; of a word that some item has, of both

_MAX_UNIT = 4  # letters of a unit that is written apart from its number
_NUMBER = re.compile(r"\d+|[^\W\d_]+")


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
    if is_measure(word):
        best = unit_parts(word)
        if not terms.phrase_frequency(" ".join(best)):
            return None
        return Compound(" ".join(best), _weight(terms, word, best, is_known=is_known))
    for at in range(1, len(word)):
        pair = word[:at], word[at:]
        count = min(map(terms.word_frequency, pair))
        if count > most and _is_compound(terms, pair, is_known=is_known):
            best, most = pair, count
    if best is None:
        return None
    return Compound(" ".join(best), _weight(terms, word, best, is_known=is_known))


def unit_parts(word: str) -> tuple[str, ...]:
    """Return the numbers and the letters of a word in their order: 32, gb of 32gb."""
    return tuple(_NUMBER.findall(word))


def is_measure(word: str) -> bool:
    """Report whether a word is a number with a unit, or a letter with a number: 32gb, b12."""
    parts = unit_parts(word)
    return len(parts) == 2 and parts[0].isdigit() != parts[1].isdigit()


def _weight(terms: IndexTerms, word: str, parts: Sequence[str], *, is_known: bool) -> float:
    return terms.rarity(word) / sum(map(terms.rarity, parts)) if is_known else 1.0


def _is_compound(terms: IndexTerms, pair: tuple[str, str], *, is_known: bool) -> bool:
    """Report whether two words that an item has side by side may be meant by one.

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
    `total` words, for then the other words tell what is meant. A number and its unit weigh what
    they do together in any query, and as much again where they stand side by side.
    """
    found = []
    for left, right in pairwise(words):
        whole, share = left + right, 2 / total
        factor = share + share**2
        unit = right if left[-1].isdigit() else left
        if is_measure(whole.split()[-1]) and len(unit) <= _MAX_UNIT and unit not in STOP_WORDS:
            factor = max(factor, 1.0)
            beside = [f"{left} {right}", *([whole] if " " in whole else [])]
            found += [Compound(way, 1.0) for way in beside if terms.phrase_frequency(way)]
        if " " not in whole and terms.word_frequency(whole):
            apart = terms.rarity(left) + terms.rarity(right)
            found.append(Compound(whole, factor * apart / terms.rarity(whole)))
    return found
