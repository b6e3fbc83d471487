"""Highlights of search results: texts of an item with the words of the query marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from models.compute.checkpoint import checkpoint
from models.text.terms import plain_text
from service.domain.records import Item
from service.questions.answers import AnsweredItemOut, MarkedOut

Spans = Sequence[tuple[int, int]]  # (start, end) in characters, rising, apart

WIDTH = 220  # characters of a snippet, about


def add_highlights(
    items: Sequence[AnsweredItemOut],
    stored: Sequence[Item | None],
    spans_of: Callable[[str], Spans],
) -> None:
    """Add `highlights` to each item of an answer."""
    for item, record in zip(items, stored, strict=True):
        checkpoint()
        item["highlights"] = {} if record is None else highlights(record, spans_of)


def highlights(item: Item, spans_of: Callable[[str], Spans]) -> dict[str, list[MarkedOut]]:
    """The title and a snippet of the description, where it has them, without markup.

    `spans_of` gives the places of the query's words in a text.
    """
    found = {}
    if title := plain_text(item.title):
        found["title"] = marked(title, spans_of(title))
    if text := " ".join(plain_text(item.description).split()):
        found["description"] = snippet(text, spans_of(text))
    return found


def without_markup(item: Item) -> Item:
    """Return an item with its title and description as a reader sees them."""
    texts = plain_text(item.title), plain_text(item.description)
    return replace(item, title=texts[0], description=texts[1])


def marked(text: str, spans: Spans) -> list[MarkedOut]:
    """The text in parts, the words at the spans marked."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return [
        MarkedOut(text=text[start:end], match=at % 2 == 1)
        for at, (start, end) in enumerate(pairwise(edges))
        if end > start
    ]


def snippet(text: str, spans: Spans) -> list[MarkedOut]:
    """The part of a text with the most different marked words, with an ellipsis where it is cut."""
    if len(text) <= WIDTH:
        return marked(text, spans)
    start, end = _window(text, spans)
    inside = [(a - start, b - start) for a, b in spans if start <= a and b <= end]
    parts = marked(text[start:end], inside)
    if start > 0:
        parts.insert(0, MarkedOut(text="… ", match=False))
    if end < len(text):
        parts.append(MarkedOut(text=" …", match=False))
    return parts


def _window(text: str, spans: Spans) -> tuple[int, int]:
    """Return where to cut, between words: the first of the best places."""
    # The beginning, and a little before each marked word.
    starts = [0, *(min(max(0, start - WIDTH // 5), len(text) - WIDTH) for start, _ in spans)]

    def different_words(start: int) -> int:
        return len({text[a:b].casefold() for a, b in spans if start <= a and b <= start + WIDTH})

    best = max(starts, key=different_words)
    start = 0 if best == 0 else text.find(" ", best - 1) + 1
    end = min(len(text), start + WIDTH)
    if end < len(text):
        cut = text.rfind(" ", start, end)
        end = cut if cut > start else end
    return start, end
