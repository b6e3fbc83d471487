"""Spelling: the words of the titles that are one edit away from an unknown word."""

from __future__ import annotations

from collections.abc import Iterable

from models.text.index_terms import IndexTerms

_MIN_CORRECTED = 3  # letters: shorter words have no correction


def near_words(terms: IndexTerms, word: str) -> list[str]:
    """Return the words of titles at a distance of one edit, the likeliest first.

    These begin as the word does, for few mistake the first letter, have its letters at other
    places, and are the most frequent. A word with a digit has none: another number is another
    thing.
    """
    if len(word) < _MIN_CORRECTED or has_digit(word):
        return []
    # Looking up some hundred edits takes less than comparing the word with every word.
    edits = single_edits(word, terms.letters | {*word})
    near = {other: count for other in edits if (count := terms.title_frequency(other))}

    def order(other: str) -> tuple[int, bool, int, str]:
        starts = (word[0], word[1], "")
        kind = next(at for at, start in enumerate(starts) if other.startswith(start))
        return kind, sorted(other) != sorted(word), -near[other], other

    return sorted(near, key=order)


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


def has_digit(text: str) -> bool:
    """Report whether a text has a digit."""
    return any(letter.isdigit() for letter in text)
