"""BM25 over items compared with a float64 loop, and the parsing of queries."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rapidfuzz.distance import OSA

from models.text.bm25 import MAX_QUERY_TERMS, TITLE_WEIGHT, BM25Index, BM25Writer, Document, Hits
from models.text.query_parser import single_edits
from tests.support.reference import bm25

LETTERS = ["ant", "bee", "cat", "dog", "elk", "fox"]  # each its own stem


def indexed(titles: Sequence[str], texts: Sequence[str] | None = None) -> BM25Index:
    """The words of items whose rows are their places."""
    texts = [""] * len(titles) if texts is None else texts
    return BM25Writer().update(
        Document(row, title, [text])
        for row, (title, text) in enumerate(zip(titles, texts, strict=True))
    )


def every(size: int) -> NDArray[np.bool_]:
    return np.ones(size, dtype=np.bool_)


def search(words: BM25Index, query: str, size: int, count: int = 100) -> Hits:
    return words.search(words.parser.parse(query), count, every(size))


@st.composite
def collections(draw: st.DrawFn) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Titles and texts of items, none too long for the index to keep their exact lengths."""
    some = st.lists(st.sampled_from(LETTERS), max_size=8)
    titles = draw(st.lists(some, min_size=1, max_size=8))
    texts = [draw(some) for _ in titles]
    query = draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5))
    return titles, texts, query


@settings(max_examples=60, deadline=None, derandomize=True)
@given(collections())
def test_scores_equal_bm25_with_weighted_titles(
    made: tuple[list[list[str]], list[list[str]], list[str]],
) -> None:
    titles, texts, query = made
    words = indexed([" ".join(title) for title in titles], [" ".join(text) for text in texts])
    known = [word for word in query if any(word in part for part in [*titles, *texts])]
    documents = {
        row: title * TITLE_WEIGHT + text
        for row, (title, text) in enumerate(zip(titles, texts, strict=True))
        if title or text
    }
    assert len(words) == len(documents)
    if not documents:
        assert not len(search(words, " ".join(query), len(titles)).rows)
        return
    scored = zip(documents, bm25(list(documents.values()), known), strict=True)
    expected = {row: score for row, score in scored if score > 0}
    parsed = words.parser.parse(" ".join(known))
    found = words.search(parsed, 100, every(len(titles)))
    scores = dict(zip(found.rows.tolist(), found.scores.tolist(), strict=True))
    assert scores.keys() == expected.keys()
    for row, score in scores.items():
        assert score == pytest.approx(expected[row], rel=1e-5)
    assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)


def test_words_are_found_by_their_stem_in_any_case_and_without_accents() -> None:
    words = indexed(["Running Naïvely", "cats", "a cat runs"])
    assert set(search(words, "RUN", 3).rows) == {0, 2}
    assert set(search(words, "naively", 3).rows) == {0}
    assert set(search(words, "cat", 3).rows) == {1, 2}


@pytest.mark.parametrize(
    "word", ["straße", "STRAẞE", "οδός", "ΟΔΟΣ", "Éclair", "ﬁne", "ſo", "Ǆ", "Kelvin"]
)
def test_letter_case_is_folded_as_unicode_folds_it(word: str) -> None:
    """Spellings that are equal under `str.casefold` are one term."""
    words = indexed([word, "ant"])
    for written in (word, word.lower(), word.upper(), word.title()):
        if written.casefold() == word.casefold():
            assert search(words, written, 2).rows.tolist() == [0], written


def test_earlier_index_is_unchanged_by_updates() -> None:
    index = BM25Writer()
    first = index.update([Document(0, "ant", []), Document(1, "bee", ["fox"])])
    second = index.update([Document(0, "", []), Document(1, "cat", []), Document(2, "ant", [])])
    assert search(first, "ant", 3).rows.tolist() == [0]
    assert search(first, "fox", 3).rows.tolist() == [1]
    assert len(first) == 2
    assert search(second, "ant", 3).rows.tolist() == [2]
    assert not len(search(second, "fox", 3).rows)
    assert search(second, "cat", 3).rows.tolist() == [1]
    assert len(second) == 2


@pytest.mark.parametrize("open_rows", [3, 700, 7_000])
def test_search_ranks_the_allowed_rows(open_rows: int) -> None:
    """The best of the allowed rows are found, however few or many are allowed."""
    size = 9_000
    rng = np.random.default_rng(open_rows)
    lengths = rng.integers(1, 30, size)
    words = indexed(["ant " + "bee " * int(length) for length in lengths])
    allowed = np.zeros(size, dtype=np.bool_)
    allowed[rng.permutation(size)[:open_rows]] = True
    found = words.search(words.parser.parse("ant"), 50, allowed)
    everything = words.search(words.parser.parse("ant"), size, every(size))
    best = everything.scores[allowed[everything.rows]][:50]
    assert allowed[found.rows].all()
    assert len(set(found.rows.tolist())) == min(50, open_rows)
    np.testing.assert_allclose(found.scores, best, rtol=1e-6)
    assert not len(words.search(words.parser.parse("ant"), 50, np.zeros(size, dtype=np.bool_)).rows)


def test_phrase_matches_by_stem() -> None:
    """Results contain the phrase, by stem; other words only add to the score."""
    words = indexed(["the red car", "cars are red", "red cars fast", "fast"])
    parsed = words.parser.parse('"red car" fast')
    assert parsed.phrases == ("red car",)
    rows = words.rows_with_phrases(parsed)
    assert rows is not None
    assert set(rows.tolist()) == {0, 2}
    assert words.search(parsed, 10, every(4)).rows.tolist() == [2, 0]
    assert words.rows_with_phrases(words.parser.parse("red car")) is None
    assert words.rows_with_phrases(words.parser.parse('"" red')) is None
    both = words.rows_with_phrases(words.parser.parse('"red car" "cars fast"'))
    assert both is not None
    assert both.tolist() == [2]


@pytest.mark.parametrize(
    ("query", "text", "meant"),
    [
        ("pandas", "pandas", {}),  # it is there
        ("panads", "pandas", {"panads": ("pandas",)}),  # two letters changed places
        ("pamdas", "pandas", {"pamdas": ("pandas",)}),
        ("xpandas", "pandas", {"xpandas": ("pandas",)}),
        ("qandas rule", "pandas rule", {"qandas": ("pandas",)}),  # even the first letter
        ("pand", "pandas", {"pand": ("pandas",)}),  # somebody is typing
        ("pand ", "pand ", {}),  # and is not any more
        ("pand* rule", "pandas rule", {}),  # what a star stands for is no correction
        ("rule*", "ruler", {}),  # the most frequent first
        ("pándas rúlerr", "pándas ruler", {"rúlerr": ("ruler",)}),  # as it was typed
        (
            "The Ruler, of Panads!",
            "The Ruler, of Pandas!",
            {"panads": ("pandas",)},
        ),  # the rest stays
        ("PANADS", "PANDAS", {"panads": ("pandas",)}),  # and so do capitals
        ("xy", "xy", {}),  # too short to be anything else
        ("zebras", "zebras", {}),  # two letters away from anything
    ],
)
def test_unknown_word_is_corrected(
    query: str, text: str, meant: dict[str, tuple[str, ...]]
) -> None:
    """An unknown word is completed at the end of a query, else corrected by one edit."""
    words = indexed(["pandas rule", "the ruler", "ruler zebra crossing x"], ["", "", "zzz"])
    parsed = words.parser.parse(query)
    assert parsed.text == text
    assert parsed.corrections == meant


WORD = st.text("abcdé", min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(word=WORD, other=WORD)
@example("ab", "ba")
@example("abcd", "acbd")
@example("a", "")
def test_one_mistake_is_a_distance_of_one(word: str, other: str) -> None:
    """`single_edits` contains exactly the words at OSA distance 1."""
    assert (other in single_edits(word, "abcdé")) == (
        other != "" and OSA.distance(word, other) == 1
    )


def test_corrections_use_the_script_of_the_titles() -> None:
    """Corrections use the letters of the indexed titles and prefer frequent words."""
    words = indexed(["Война и мир", "война миров", "naïve bayes", "the knave"])
    assert words.parser.parse("вайна").text == "война"
    assert words.parser.parse("вoйна").text == "война"  # with a Latin o
    assert words.parser.parse("nsive").text == "naive"
    assert (
        words.parser.parse("naave").text == "naive"
    )  # rather than knave: few mistake the first letter


def test_words_in_a_phrase_are_searched_for_as_they_are() -> None:
    """A mistyped word within a phrase is not replaced; its correction is offered."""
    words = indexed(["big pandas rule", "pandas big", "rule"])
    parsed = words.parser.parse('the "big Panads" rule')
    assert parsed.phrases == ("big Panads",)
    assert parsed.corrections == {}
    assert parsed.text == "the  big Panads  rule"
    assert parsed.did_you_mean == 'the "big Pandas" rule'
    rows = words.rows_with_phrases(parsed)
    assert rows is not None
    assert rows.tolist() == []
    assert words.parser.parse('"big pand"').phrases == (
        "big pand",
    )  # what is quoted is not still typed


def test_frequent_word_is_offered_for_a_rare_misspelling() -> None:
    """A rare word that items have is searched for alone, and a far more frequent one is offered."""
    words = indexed(["pyhton"] + [f"python {n}" for n in range(150)] + ["dask", "dusk"])
    parsed = words.parser.parse("pyhton")
    assert parsed.corrections == {}
    assert parsed.did_you_mean == "python"
    assert search(words, "pyhton", 153).rows.tolist() == [0]
    assert words.parser.parse("dusk").did_you_mean is None


def test_short_word_is_not_replaced() -> None:
    """A correction of a short unknown word is offered, and nothing else is searched for."""
    words = indexed(["a lamp", "a lantern"])
    parsed = words.parser.parse("lmap lanetrn")
    assert parsed.corrections == {"lanetrn": ("lantern",)}
    assert (parsed.text, parsed.did_you_mean) == ("lmap lantern", "lamp lantern")
    assert search(words, "lmap", 2).rows.tolist() == []


def test_a_short_word_is_corrected_by_its_neighbours() -> None:
    """A short unknown word becomes the spelling that stands beside its neighbour in some item."""
    titles = ["Lone Star", "Star Wars", "wash the car", *["war"] * 9]
    words = indexed(titles)
    for query, spelling in (("star wasr", "wars"), ("wasr star", None), ("wasr the car", "wash")):
        parsed = words.parser.parse(query)
        assert parsed.corrections == ({} if spelling is None else {"wasr": (spelling,)})
    assert titles[search(words, "star wasr", len(titles)).rows[0]] == "Star Wars"
    assert words.parser.parse('"star wasr"').corrections == {}


@pytest.mark.parametrize(
    "query", ["978-0-439-02348-1", "978.0.439.02348.1", "978 0 439 02348 1", "b-1", "+49 30 1"]
)
def test_a_part_of_an_identifier_is_no_beginning_of_a_year(query: str) -> None:
    """The parts of a number or a code are neither completed nor corrected."""
    words = indexed(["It (1990)", "Heat (1995)"])
    parsed = words.parser.parse(query)
    assert parsed.corrections == {}
    assert not len(search(words, query, 2).rows)
    assert words.parser.parse("1").corrections == {"1": ("1990", "1995")}  # somebody is typing


def test_a_number_with_separators_is_one_term() -> None:
    """A number is found as it is written, or as one word, and not by its parts."""
    words = indexed(["Volume 1", "see 978-0-439-02348-1", "ISBN 9780439023481", "0 and 439"])
    assert set(search(words, "978-0-439-02348-1", 4).rows.tolist()) == {1, 2}
    assert not len(search(words, "978-0-439-02348-2", 4).rows)


def test_words_that_say_nothing_find_nothing_beside_others() -> None:
    """Stop words are searched for and marked only in phrases, and if no other word is known."""
    titles = ["A Room with a View", "Space War", "The Who", "about robots"]
    words = indexed(titles)
    query = "a film about space war with robots"
    found = {titles[row] for row in search(words, query, 4).rows.tolist()}
    assert found == {"Space War", "about robots"}
    mark = words.match_spans(words.parser.parse(query))
    assert [titles[3][start:end] for start, end in mark(titles[3])] == ["robots"]
    assert mark(titles[0]) == []
    assert search(words, "the who", 4).rows.tolist() == [2]
    assert search(words, '"with a" room', 4).rows.tolist() == [0]


def test_a_star_stands_for_any_number_of_words() -> None:
    """More words than are ranked begin as a starred one, and all of their items are found."""
    words = indexed([f"zeph{n:03} thing" for n in range(300)] + ["other"])
    parsed = words.parser.parse("zeph*")
    assert sorted(search(words, "zeph*", 301, 301).rows.tolist()) == list(range(300))
    assert len(words.rows_with_words(parsed, 1_000)) == 300
    allowed = every(301)
    allowed[:] = False
    allowed[299] = True
    assert words.search(parsed, 10, allowed).rows.tolist() == [299]
    assert words.match_spans(parsed)("a zeph299") == [(2, 9)]


def test_coverage_is_the_weight_of_the_known_words() -> None:
    """Coverage is 1 with known words alone, 0 with none, and little with common ones alone."""
    words = indexed([f"the word{n}" for n in range(100)])
    assert words.parser.parse("the word7").coverage == 1
    assert words.parser.parse("xyzzyx qwrtzp").coverage == 0
    assert 0 < words.parser.parse("the xyzzyx").coverage < 0.01


@pytest.mark.parametrize("query", ["", "   ", '"', '""', "*", "🙂🙂", "?!", "שלום", "ß" * 50])
def test_a_query_without_a_known_word_finds_nothing(query: str) -> None:
    words = indexed(["ant", "bee"])
    assert not len(search(words, query, 2).rows)
    assert words.rows_with_phrases(words.parser.parse(query)) is None


def test_of_a_long_query_the_rarest_words_are_looked_up() -> None:
    """A query longer than MAX_QUERY_TERMS is searched by its rarest words."""
    common = [f"w{n}" for n in range(200)]
    words = indexed([" ".join([*common, "rare"]), *[" ".join(common)] * 3])
    found = search(words, " ".join([*common * 10, "rare"]), 4)
    assert found.rows[0] == 0
    few = search(words, " ".join(common[: MAX_QUERY_TERMS + 1]), 4)
    assert few.scores[0] > 0
