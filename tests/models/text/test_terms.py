"""Folded texts, and the plain text of HTML."""

import unicodedata
from functools import cache
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.text.bm25 import BM25Index, BM25Writer, Document
from models.text.terms import fold, fold_aligned, plain_text

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
FORMS: tuple[Form, ...] = ("NFC", "NFD", "NFKC", "NFKD")

TITLES = {
    "creme": "Crème brûlée torch",
    "tea": "Löwenzahn Tee",
    "fish": "Nước mắm",
    "korean": "한국어 문법",
    "arabic": "كِتَابٌ",
    "hebrew": "שָׁלוֹם",
    "city": "İSTANBUL",
    "light": "Işık IŞIK ışık",
    "greek": "ΟΔΟΣ",
    "kana": "ｶﾞﾗｽ",
    "tree": "Ёлка",
    "war": "Война",
}


@cache
def indexed(form: Form) -> BM25Index:
    """The titles in a Unicode form."""
    return BM25Writer().update(
        Document(row, unicodedata.normalize(form, title), [])
        for row, title in enumerate(TITLES.values())
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("crème brûlée", "creme"),
        ("creme brulee", "creme"),
        ("brûlée", "creme"),
        ("löwenzahn", "tea"),
        ("lowenzahn", "tea"),
        ("nước mắm", "fish"),
        ("nuoc mam", "fish"),
        ("한국어", "korean"),
        ("كتاب", "arabic"),
        ("كِتَاب", "arabic"),
        ("שלום", "hebrew"),
        ("istanbul", "city"),
        ("ıstanbul", "city"),
        ("İstanbul", "city"),
        ("isik", "light"),
        ("ışık", "light"),
        ("οδός", "greek"),
        ("ガラス", "kana"),
        ("елка", "tree"),
        ("война", "war"),
        ("ångström", None),
    ],
)
def test_texts_are_found_however_they_are_encoded_and_accented(
    form: Form, query: str, found: str | None
) -> None:
    """Every Unicode form of a query finds every form of a text, with or without its marks."""
    names, index = [*TITLES], indexed(form)
    for asked in FORMS:
        parsed = index.parser.parse(unicodedata.normalize(asked, query))
        rows = index.search(parsed, 9, np.ones(len(names), np.bool_)).rows
        assert [names[row] for row in rows.tolist()] == ([] if found is None else [found])
        if found is None:
            continue
        title = unicodedata.normalize(form, TITLES[found])
        marked = [title[start:end] for start, end in index.match_spans(parsed)(title)]
        assert marked
        # A letter is marked with its marks.
        words = {unicodedata.normalize("NFC", word) for word in title.split()}
        assert {unicodedata.normalize("NFC", part) for part in marked} <= words


LETTERS = st.text(
    st.one_of(
        st.characters(), st.sampled_from("aIiİı\u0301\u0307\u0308ßﬁ½ᄒ\u1161\u11abガｶﾞй\u064b")
    )
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(LETTERS)
@example("e\u0301")
@example("ｶﾞ")
def test_aligned_folding_is_folding(text: str) -> None:
    """The aligned form has the same text, and places that rise and cover the text in order."""
    folded = fold_aligned(text)
    assert folded.text == fold(text)
    assert len(folded.starts) == len(folded.ends) == len(folded.text)
    for start, end in zip(folded.starts, folded.ends, strict=True):
        assert 0 <= start < end <= len(text)
    assert list(folded.starts) == sorted(folded.starts)


def test_a_fraction_of_two_words_is_marked_once() -> None:
    """Words that are folded from one character have one place."""
    index = BM25Writer().update([Document(0, "½ cup", [])])
    assert index.match_spans(index.parser.parse("1 2 cup"))("½ cup") == [(0, 1), (2, 5)]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            "<p>A <strong>sturdy</strong> mug&nbsp;for piers.</p><ul><li>350&nbsp;ml</li></ul>Gift",
            "A sturdy mug for piers. 350 ml Gift",
        ),
        ("<p>one<p>two<br/>three", "one two three"),
        ("<b>st</b>urdy", "sturdy"),
        ("<style>p { color: red }</style><SCRIPT>alert(1)</SCRIPT>seen<!-- not -->", "seen"),
        ("<td>1</td><td>2</td>", "1 2"),
        ("Tom &amp; Jerry&#39;s", "Tom & Jerry's"),
        ("a < b and c > d,  I <3 vector<int> &c. AT&T", None),
        ("two\n\nlines", None),
        ("", None),
    ],
)
def test_markup_is_read_as_its_text(written: str, read: str | None) -> None:
    """Elements, comments and references go; a text without markup stays as it is."""
    assert plain_text(written) == (written if read is None else read)


def test_tags_within_tags_without_end_are_read_without_a_parser() -> None:
    """More tags than are parsed, which may be nested, leave their text all the same."""
    assert plain_text("<div>" * 50_000 + "deep &amp; still") == "deep & still"
