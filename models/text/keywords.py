"""Keywords, such as stock codes and ISBNs, which match as wholes and by their beginnings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tantivy
from numpy.typing import NDArray

WHOLE = 2.0  # level of a keyword that was typed as a whole
MAX_COMPLETED = 200  # keywords at most that a beginning stands for
_MAX_CHARACTERS = 256  # longer values are texts
_SEPARATORS = re.compile(r"[\s\-\u2010-\u2015._/:]+")
_FIELD = "\0"  # between a keyword and the name of its field, in the terms of the index


class KeywordQuery(NamedTuple):
    """A part of a query that is a keyword, or begins one."""

    text: str  # normalised
    prefix: bool  # stands for all keywords that begin with the text
    is_code: bool = True  # and not words of texts too


class KeywordHits(NamedTuple):
    """Keywords of items that match a query, each item's best one."""

    rows: NDArray[np.int64]  # [M] item rows, ascending and distinct
    levels: NDArray[np.float32]  # [M] `WHOLE`, or how much of the keyword was typed, see `find`
    fields: tuple[str, ...]  # [M] names of the fields


NO_KEYWORDS = KeywordHits(np.zeros(0, np.int64), np.zeros(0, np.float32), ())


def normalize_keyword(text: str) -> str:
    """Return a keyword in the form that is compared: case-folded, without separators.

    Separators are white space, hyphens, full stops, underscores, slashes and colons. A text of
    separators alone keeps them.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().replace(_FIELD, "")
    return _SEPARATORS.sub("", folded) or folded.strip()


def keyword_terms(keywords: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the terms of the keywords of an item, which are given by field."""
    return {
        normal + _FIELD + name
        for name, values in keywords.items()
        for value in values
        if len(value) <= _MAX_CHARACTERS and (normal := normalize_keyword(value))
    }


class KeywordIndex:
    """The keywords in one state of an index.

    Args:
        searcher: the state.
        schema: of the index, with the fields `row` and `keywords`.
    """

    def __init__(self, searcher: tantivy.Searcher, schema: tantivy.Schema) -> None:
        self._searcher, self._schema = searcher, schema

    def has(self, keyword: KeywordQuery) -> bool:
        """Whether an item has such a keyword."""
        return any(len(self._rows(term, 1)) for term in self._terms(keyword))

    def find(self, keywords: Sequence[KeywordQuery]) -> KeywordHits:
        """Return the items that have one of these keywords.

        The level of a keyword of which a part was typed is the part's share of its length, in
        (0, 1]; if it may also be a word, the share less 1, at most 0.
        """
        best: dict[int, tuple[float, str]] = {}
        for keyword in keywords:
            for term in self._terms(keyword):
                whole, _, field = term.partition(_FIELD)
                share = len(keyword.text) / len(whole)
                level = share if keyword.is_code else share - 1
                found = (level if keyword.prefix else WHOLE, field)
                for row in self._rows(term, max(1, int(self._searcher.num_docs))).tolist():
                    if row not in best or found[0] > best[row][0]:
                        best[row] = found
        if not best:
            return NO_KEYWORDS
        rows = sorted(best)
        levels = np.array([best[row][0] for row in rows], np.float32)
        return KeywordHits(np.array(rows, np.int64), levels, tuple(best[row][1] for row in rows))

    def _terms(self, keyword: KeywordQuery) -> list[str]:
        prefix = keyword.text if keyword.prefix else keyword.text + _FIELD
        found = self._searcher.terms_with_prefix("keywords", prefix, limit=MAX_COMPLETED)
        return [term for term, _ in found]

    def _rows(self, term: str, most: int) -> NDArray[np.int64]:
        query = tantivy.Query.term_query(self._schema, "keywords", term)
        query = tantivy.Query.const_score_query(query, 1.0)
        hits = self._searcher.search(query, most, count=False).hits
        rows = self._searcher.fast_field_values("row", [address for _, address in hits])
        return np.array(rows, dtype=np.int64)
