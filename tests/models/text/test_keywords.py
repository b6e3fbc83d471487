"""Keywords of items compared with a loop over all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.text.bm25 import BM25Index, BM25Writer, Document
from models.text.terms import WHOLE, KeywordQuery, normalize_keyword


def indexed(*keywords: str, titles: tuple[str, ...] = ()) -> BM25Index:
    """Items with one keyword each, whose rows are their places."""
    named = [*titles, *[""] * (len(keywords) - len(titles))]
    return BM25Writer().update(
        Document(row, title, [], {"item_id": [keyword]})
        for row, (keyword, title) in enumerate(zip(keywords, named, strict=True))
    )


def rows(index: BM25Index, query: str) -> dict[int, float]:
    """The items whose keywords match a query, with their levels."""
    hits = index.keyword_hits(index.parser.parse(query))
    return dict(zip(hits.rows.tolist(), hits.levels.tolist(), strict=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("85123A", "85123a"),
        ("978-3-16-148410-0", "9783161484100"),
        ("978 3 16 148410 0", "978.3.16.148410.0"),
        ("ab_12/c:d", "AB12CD"),
        ("STRASSE-1", "straße1"),
        ("No\u20111", "no-1"),
    ],
)
def test_case_and_separators_do_not_matter(one: str, other: str) -> None:
    """Two spellings of a keyword are equal, and each finds what was stored as the other."""
    assert normalize_keyword(one) == normalize_keyword(other)
    assert rows(indexed(one), other) == rows(indexed(other), one) == {0: WHOLE}


def test_symbols_are_not_separators() -> None:
    """Keywords that differ in a symbol differ; one of separators alone is itself."""
    assert normalize_keyword("C++") != normalize_keyword("C#")
    assert rows(indexed("--", "C++", "C#"), "C++") == {1: WHOLE}
    assert rows(indexed("--", "C++"), "--") == {0: WHOLE}


CODE = st.text("ab12-", min_size=1, max_size=6).filter(lambda code: code.strip("-") != "")


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(CODE, min_size=1, max_size=8), CODE)
def test_a_keyword_query_is_equal_to_a_loop(codes: list[str], typed: str) -> None:
    """Whole keywords and beginnings match as a loop over all keywords finds them."""
    index = indexed(*codes)
    bare = typed.replace("-", "")
    stored = [code.replace("-", "") for code in codes]
    whole = {row: WHOLE for row, code in enumerate(stored) if code == bare}
    begun = {
        row: pytest.approx(len(bare) / len(code))
        for row, code in enumerate(stored)
        if code.startswith(bare)
    }
    for prefix, expected in ((False, whole), (True, begun)):
        hits = index.keyword_hits(
            index.parser.parse("")._replace(keywords=(KeywordQuery(bare, prefix),))
        )
        found = dict(zip(hits.rows.tolist(), hits.levels.tolist(), strict=True))
        assert found == expected
    if whole:
        assert rows(index, typed) == whole
    elif len(bare) >= 3:
        assert rows(index, typed) == begun


def test_a_keyword_is_never_corrected_and_not_encoded() -> None:
    """A known keyword stays as it is though it is a letter from a word, and has no meaning."""
    without = indexed("y", "x", titles=("", "lantern"))
    assert without.parser.parse("LANTERM").corrections == {"lanterm": ("lantern",)}
    index = indexed("lanterm", "x", titles=("", "lantern"))
    parsed = index.parser.parse("LANTERM")
    assert parsed.keywords == (KeywordQuery("lanterm", prefix=False, is_code=True),)
    assert (parsed.corrections, parsed.did_you_mean, parsed.text) == ({}, None, "")


def test_a_keyword_that_is_a_word_too_keeps_its_meaning() -> None:
    """A query that is a keyword and a word of titles is found as both."""
    index = indexed("lantern", "x", titles=("", "red lantern"))
    parsed = index.parser.parse("lantern")
    assert [keyword.text for keyword in parsed.keywords] == ["lantern"]
    assert parsed.text == "lantern"


def test_a_part_of_a_query_is_a_keyword_if_it_is_no_word() -> None:
    """A code in a longer query is a keyword, a number that titles have is not."""
    index = indexed("2001", "85123A", "978-3-16-148410-0", titles=("other", "odyssey 2001", "book"))
    assert index.parser.parse("2001 odyssey").keywords == ()
    parsed = index.parser.parse("odyssey 85123a")
    assert [keyword.text for keyword in parsed.keywords] == ["85123a"]
    assert parsed.text == "odyssey"
    assert rows(index, "odyssey 978 3 16 148410 0") == {2: WHOLE}
    assert rows(index, '"85123-A"') == {1: WHOLE}


def test_a_star_finds_keywords_and_words_of_every_field() -> None:
    """A prefix with a star stands for keywords and for words of titles and of other texts."""
    index = BM25Writer().update(
        [
            Document(0, "lantern", []),
            Document(1, "x", ["a landing of planes", "language"]),
            Document(2, "y", [], {"attributes.sku": ["LAN-7"]}),
            Document(3, "plan", []),
        ]
    )
    parsed = index.parser.parse("lan*")
    found = index.search(parsed, 9, np.ones(4, np.bool_))
    assert set(found.rows.tolist()) == {0, 1}
    hits = index.keyword_hits(parsed)
    assert (hits.rows.tolist(), hits.fields) == ([2], ("attributes.sku",))
    assert rows(index, "lan") == {}


def test_a_removed_item_is_no_keyword_any_more() -> None:
    """The keywords of an item go when it does, or when it has others."""
    writer = BM25Writer()
    writer.update([Document(0, "", [], {"item_id": ["A1"]}), Document(1, "", [], {"s": ["B1"]})])
    index = writer.update([Document(0, "", []), Document(1, "", [], {"s": ["B2"]})])
    assert rows(index, "a1") == {}
    assert rows(index, "b1") == {}
    assert rows(index, "b2") == {1: WHOLE}
