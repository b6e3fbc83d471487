"""Parse what is typed into a search box: phrases, prefixes and corrections of spelling."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from models.text.index_terms import IndexTerms

_MAX_COMPLETIONS = 3  # words that a prefix may stand for, the most frequent
_MIN_CORRECTED = 3  # letters: shorter words are not corrected
_RARE = 5  # documents up to which a word may be a spelling mistake that they made too
_FREQUENT = 100  # times as many titles must have the correction of a word that documents have
_CACHED = 4_096  # parsed words
_PARTS = re.compile(r'"([^"]*)"|([^\s"]+)')


class ParsedQuery(NamedTuple):
    """A query as it was understood."""

    text: str  # with its corrections, to be encoded
    terms: tuple[tuple[str, ...], ...]  # the words in their order, each with its alternatives
    phrases: tuple[str, ...]  # quoted parts, which every result must have
    corrections: Mapping[str, tuple[str, ...]]  # words of the query -> what they stand for


class QueryParser:
    """Parses queries by the terms of one state of an index.

    A quoted part is a phrase. A word that no document has stands for one that titles have: for a
    longer one where it ends the query, as it does while somebody types, or where a star follows;
    otherwise for one at a distance of one edit. A word that hardly any document has may also stand
    for such a word that many titles have. All other text stays as it was typed, since what it means
    may depend on more than its words.
    """

    def __init__(self, terms: IndexTerms) -> None:
        self._terms = terms
        # One state of an index never changes, and people search for the same words.
        self._alternatives = lru_cache(_CACHED)(partial(_alternatives, terms))

    def parse(self, query: str) -> ParsedQuery:
        """Parse a query; any text is one."""
        words: list[tuple[str, ...]] = []
        phrases: list[str] = []
        corrections: dict[str, tuple[str, ...]] = {}
        text, copied = "", 0  # the corrected query, up to this position
        for part in _PARTS.finditer(query):
            quoted = part[1] is not None
            start, plain = part.start(1 if quoted else 2), part[1 if quoted else 2]
            starred = not quoted and plain.endswith("*")
            tokens = self._terms.words(plain)
            corrected, done = "", 0
            for at, token in enumerate(tokens):
                word, last = token.text, at == len(tokens) - 1 and not quoted
                ends = last and (starred or part.end() == len(query))
                alternatives = self._alternatives(word, ends, last and starred)
                words.append(alternatives)
                if alternatives != (word,):
                    corrections[word] = alternatives
                if alternatives[0] != word:
                    begin, end = token.char_offset_from, token.char_offset_to
                    corrected += plain[done:begin] + _match_case(alternatives[0], plain[begin:end])
                    done = end
            corrected += plain[done:]
            text += query[copied:start] + corrected
            copied = part.end(1 if quoted else 2)
            if quoted and self._terms.stems(corrected):
                phrases.append(corrected)
        text = re.sub('[*"]', " ", text + query[copied:])
        return ParsedQuery(
            " ".join(text.split()) if corrections else text,
            tuple(words),
            tuple(phrases),
            corrections,
        )


def _alternatives(terms: IndexTerms, word: str, ends: bool, starred: bool) -> tuple[str, ...]:
    """Return the words that a word may stand for, the most frequent first."""
    known = 0 if starred else sum(map(terms.stem_frequency, terms.stems(word)))
    if known:
        near = _corrected(terms, word) if known <= _RARE else ()
        often = [one for one in near if terms.title_frequency(one) >= _FREQUENT * known]
        return (word, *often)
    if ends:
        longer = terms.title_words(word)
        if longer:
            return tuple(longer[:_MAX_COMPLETIONS])
    return _corrected(terms, word) or (word,)


def _corrected(terms: IndexTerms, word: str) -> tuple[str, ...]:
    """Return the most frequent word of titles at a distance of one edit, if there is one."""
    if len(word) < _MIN_CORRECTED:
        return ()
    # Looking up some hundred edits takes less than comparing the word with every word.
    near = {
        other: terms.title_frequency(other) for other in single_edits(word, terms.letters | {*word})
    }
    for start in (word[0], word[1], ""):  # few mistake the first letter
        found = [other for other, count in near.items() if count and other.startswith(start)]
        if found:
            return (min(found, key=lambda other: (-near[other], other)),)
    return ()


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


def _match_case(word: str, like: str) -> str:
    """Write a word in the letter case of another, since an encoder may depend on it."""
    if like.isupper():
        return word.upper()
    return word.capitalize() if like[:1].isupper() else word
