"""Highlighted texts, and snippets of long ones."""

from hypothesis import given, settings
from hypothesis import strategies as st

from models.text.bm25 import BM25Writer, Document
from service.domain.records import Item
from service.engine.highlight import WIDTH, highlights, marked, snippet

words = st.lists(st.sampled_from(["ant", "bee", "cats", "dögs", "🚀", "a-b"]), max_size=120)


def spans_of(text: str, wanted: set[str]) -> list[tuple[int, int]]:
    """Return where whole words stand, by cutting at spaces."""
    spans, at = [], 0
    for word in text.split(" "):
        if word in wanted:
            spans.append((at, at + len(word)))
        at += len(word) + 1
    return spans


@settings(max_examples=200, deadline=None, derandomize=True)
@given(words, st.sets(st.sampled_from(["ant", "bee", "dögs", "🚀"])))
def test_the_parts_are_the_text(found: list[str], wanted: set[str]) -> None:
    """The parts concatenate to the text, and exactly the wanted words are marked."""
    text = " ".join(found)
    parts = marked(text, spans_of(text, wanted))
    assert "".join(part["text"] for part in parts) == text
    assert [part["text"] for part in parts if part["match"]] == [w for w in found if w in wanted]
    assert all(part["text"] for part in parts)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(words, st.sets(st.sampled_from(["ant", "bee", "dögs", "🚀"])))
def test_a_snippet_is_a_part_of_the_text(found: list[str], wanted: set[str]) -> None:
    """A snippet has whole words of the text, within WIDTH, with an ellipsis where cut."""
    text = " ".join(found)
    parts = snippet(text, spans_of(text, wanted))
    shown = "".join(part["text"] for part in parts)
    core = shown.removeprefix("… ").removesuffix(" …")
    assert core in text
    assert len(core) <= WIDTH
    assert set(core.split()) <= set(found)
    assert shown.startswith("… ") == (not text.startswith(core))
    assert {part["text"] for part in parts if part["match"]} <= wanted


def test_a_snippet_shows_the_most_words_of_the_query() -> None:
    far = "filler " * 100
    text = f"ant {far}bee and ant {far}ant bee and cats {far}"
    parts = snippet(text, spans_of(text, {"ant", "bee", "cats"}))
    assert [part["text"] for part in parts if part["match"]] == ["ant", "bee", "cats"]
    plain = snippet(far, [])
    assert plain[0]["text"].startswith("filler")
    assert plain[-1] == {"text": " …", "match": False}


def test_words_are_marked_by_their_stem_where_they_stand() -> None:
    index = BM25Writer().update([Document(0, "Running naïvely", [])])
    text = "Größe 🚀: RUNS, naïve — and ran"
    spans = index.match_spans(index.parser.parse("running naively"))(text)
    assert [text[start:end] for start, end in spans] == ["RUNS", "naïve"]
    assert index.match_spans(index.parser.parse("zebra"))(text) == []


def test_an_item_without_texts_has_nothing_to_show() -> None:
    """Fields that an item lacks have no highlights."""
    assert highlights(Item("a"), lambda _: []) == {}
    found = highlights(Item("a", title="ant", description="a  bee\n ant"),
                       lambda text: spans_of(text, {"ant"}))  # fmt: skip
    assert found == {
        "title": [{"text": "ant", "match": True}],
        "description": [{"text": "a bee ", "match": False}, {"text": "ant", "match": True}],
    }
