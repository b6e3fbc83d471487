"""Spelling: the word of the titles that is one edit away from an unknown word."""

from __future__ import annotations

from collections.abc import Iterable

from models.text.index_terms import IndexTerms

_MIN_CORRECTED = 3  # letters: shorter words have no correction


def nearest_word(terms: IndexTerms, word: str) -> str | None:
    """Return the most frequent word of titles at a distance of one edit, None without one."""
    if len(word) < _MIN_CORRECTED:
        return None
    # Looking up some hundred edits takes less than comparing the word with every word.
    near = {
        other: terms.title_frequency(other) for other in single_edits(word, terms.letters | {*word})
    }
    for start in (word[0], word[1], ""):  # few mistake the first letter
        found = [other for other, count in near.items() if count and other.startswith(start)]
        if found:
            return min(found, key=lambda other: (-near[other], other))
    return None


def single_edits(word: str, letters: Iterable[str]) -> set[str]:
    """Return all strings at an optimal string alignment distance of 1.

    One letter deleted, replaced or inserted, or two neighbours transposed:
    https://norvig.com/spell-correct.html
    """
    letters = tuple(letters)
    parts = [(word[:at], word[at:]) for at in range(len(word) + 1)]
    edited = {left + right[1:] for left, right in parts if right}
    edited |= {left + right[1::-1] + right[2:] for left, right in parts if len(right) > 1}
    edited |= {left + letter + right[1:] for left, right in parts if right for letter in letters}
    edited |= {left + letter + right for left, right in parts for letter in letters}
    return edited - {word, ""}


def match_case(word: str, like: str) -> str:
    """Write a word in the letter case of another, since an encoder may depend on it."""
    if like.isupper():
        return word.upper()
    return word.capitalize() if like[:1].isupper() else word
