"""Keywords, such as stock codes and ISBNs, which match as wholes and by their beginnings."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tantivy
from numpy.typing import NDArray

WHOLE = 2.0  # level of a keyword that was typed as a whole
MAX_COMPLETED = 20_000  # keywords at most that a beginning stands for
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
    is_cut: bool = False  # a beginning stands for more keywords than were looked up


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
        """Report whether an item has such a keyword."""
        return len(self._rows(self._terms(keyword), 1)) > 0

    def find(self, keywords: Sequence[KeywordQuery]) -> KeywordHits:
        """Return the items that have one of these keywords.

        The level of a keyword of which a part was typed is the part's share of its length, in
        (0, 1]; if it may also be a word, the share less 1, at most 0.
        """
        rows, levels, names = [NO_KEYWORDS.rows], [NO_KEYWORDS.levels], list[str]()
        is_cut = False
        for keyword in keywords:
            terms = self._terms(keyword)
            is_cut |= len(terms) > MAX_COMPLETED
            # Keywords of a field that are equally long have one level: one query finds their items.
            alike = defaultdict[tuple[int, str], list[str]](list)
            for term in terms[:MAX_COMPLETED]:
                whole, _, field = term.partition(_FIELD)
                alike[len(whole), field].append(term)
            for (length, field), same in alike.items():
                share = len(keyword.text) / length
                level = share if keyword.is_code else share - 1
                found = self._rows(same, max(1, int(self._searcher.num_docs)))
                rows.append(found)
                levels.append(np.full(len(found), level if keyword.prefix else WHOLE, np.float32))
                names += [field] * len(found)
        every, ranked = np.concatenate(rows), np.concatenate(levels)
        order = np.lexsort((-ranked, every))
        best = order[np.flatnonzero(np.diff(every[order], prepend=-1))]  # of each row the first
        fields = tuple(names[at] for at in best.tolist())
        return KeywordHits(every[best], ranked[best], fields, is_cut)

    def _terms(self, keyword: KeywordQuery) -> list[str]:
        prefix = keyword.text if keyword.prefix else keyword.text + _FIELD
        found = self._searcher.terms_with_prefix("keywords", prefix, limit=MAX_COMPLETED + 1)
        return [term for term, _ in found]

    def _rows(self, terms: Sequence[str], most: int) -> NDArray[np.int64]:
        if not terms:
            return np.zeros(0, np.int64)
        query = tantivy.Query.term_set_query(self._schema, "keywords", [*terms])
        query = tantivy.Query.const_score_query(query, 1.0)
        hits = self._searcher.search(query, most, count=False).hits
        rows = self._searcher.fast_field_values("row", [address for _, address in hits])
        return np.array(rows, dtype=np.int64)
