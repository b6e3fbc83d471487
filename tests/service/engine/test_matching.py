"""Items that a text finds, by their words and by the meaning of a real encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from models.catalogue.item_filter import Condition
from models.text import terms
from models.text.encoders import StaticEncoder
from service.domain.records import Item
from service.engine.engine import Engine
from service.engine.highlight import highlights
from service.engine.selection import filter_warnings
from service.maintenance.search_calibration import build_snapshot
from service.snapshots.text_embeddings import EmbeddingCache
from tests.support import asking

EMBEDDINGS = EmbeddingCache(StaticEncoder())


def made(*titles: str, description: str = "") -> list[Item]:
    """Items of these titles, whose ids are their places."""
    return [Item(str(n), title=title, description=description) for n, title in enumerate(titles)]


async def ask(engine: Engine, items: Sequence[Item], query: Any) -> Any:
    """The answer to a search or a list of these items, the only ones."""
    stored = {item.item_id for item in engine.store.scan_items()}
    for item_id in stored - {item.item_id for item in items}:
        await engine.live.catalogue.delete_item(item_id)
    await engine.live.catalogue.put_items(items)
    return await asking.ask(engine, query)


def found(answer: Any) -> list[str]:
    """The ids of an answer."""
    return [item["item_id"] for item in answer.items]


# ------------------------------------------------------------------ markup


def test_markup_finds_nothing_and_is_not_shown() -> None:
    """Words, meaning and names and highlights are of an item's text, without its markup."""
    written = (
        "<p>A <strong>sturdy</strong> mug&nbsp;for cold piers.</p>"
        '<div class="promo" style="color:red">Gift</div>'
    )
    mug = Item("mug", title="Harbour Mug &amp; Spoon", description=written)
    text = "A sturdy mug for cold piers. Gift"
    plain = Item("plain", title="Harbour Mug & Spoon", description=text)
    snapshot = build_snapshot([mug, plain], EMBEDDINGS)
    index, keys = snapshot.catalogue.bm25_index, snapshot.catalogue.keys
    assert index is not None
    for word in ("strong", "nbsp", "style", "div", "promo", "amp"):
        assert not len(index.rows_with_words(index.parser.parse(word), 9)), word
    parsed = index.parser.parse("sturdy gift")
    assert len(index.rows_with_words(parsed, 9)) == 2
    assert (keys.vectors[keys.owners == 0] == keys.vectors[keys.owners == 1]).all()
    assert snapshot.catalogue.titles[0] == plain.title  # as every list names it
    shown = highlights(mug, index.match_spans(parsed))
    assert "".join(part["text"] for part in shown["description"]) == text
    assert [part["text"] for part in shown["description"] if part["match"]] == ["sturdy", "Gift"]
    assert "".join(part["text"] for part in shown["title"]) == plain.title


# ------------------------------------------------------------------ the floor


WORDS = (
    "red lamp",
    "blue lamp",
    "a walnut table",
    "wool carpet",
    "garden hose",
    "lamp with a view",
)


async def test_a_search_is_not_filled_with_items_that_do_not_match(fresh: Engine) -> None:
    """Items without a word of the query are answered with `fill` only, after those that match."""
    served = made(*WORDS)
    query = asking.search(asking.who(), "lamp with a", facets=(asking.facet("tags"),))
    answer = await ask(fresh, served, query)
    assert sorted(found(answer)) == ["0", "1", "5"]
    assert answer.total == 3
    filled = await ask(fresh, served, query.model_copy(update={"fill": True}))
    assert len(filled.items) > 3
    assert filled.total == 3
    assert found(filled)[:3] == found(answer)
    scores = [item["parts"]["match"] for item in filled.items]
    least = await ask(fresh, served, query.model_copy(update={"min_score": scores[1]}))
    assert found(least) == found(answer)[:2]
    assert least.total == 2
    assert found(await ask(fresh, served, query.model_copy(update={"min_score": 1e300}))) == []
    assert len(
        (await ask(fresh, served, query.model_copy(update={"min_score": -1e300}))).items
    ) == len(filled.items)


async def test_a_query_without_known_words_finds_by_meaning(fresh: Engine) -> None:
    """The floor leaves the nearest by meaning where no item has a word of the query."""
    served = made("a very big army helicopter", "Vitamin B12", "HDMI cable")
    answer = await ask(fresh, served, asking.search(asking.who(), "military helicopters"))
    assert found(answer) == ["0"]


# ------------------------------------------------------------------ bounds


async def test_every_identifier_that_begins_so_is_found(fresh: Engine) -> None:
    """The beginning of 300 ids finds all of them, and a filter is applied before any bound."""
    items = [Item(f"J28292{n:03}", title="", description="", tags=(f"t{n}",)) for n in range(300)]
    served = items
    query = asking.search(asking.who(), "J28292", limit=1000, facets=(asking.facet("tags"),))
    answer = await ask(fresh, served, query)
    assert sorted(found(answer)) == [item.item_id for item in items]
    assert answer.total == 300
    assert answer.warnings is None
    for n in (0, 150, 299):
        only = Condition("tags", {"eq": f"t{n}"})
        assert found(await ask(fresh, served, query.model_copy(update={"filter": only}))) == [
            f"J28292{n:03}"
        ]


async def test_a_bound_that_cuts_is_said(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning of too many identifiers is answered with a warning, and without a total."""
    monkeypatch.setattr(terms, "MAX_COMPLETED", 10)
    items = [Item(f"J28292{n:03}") for n in range(30)]
    served = items
    query = asking.search(asking.who(), "J28292", facets=(asking.facet("tags"),))
    for asked in (query, query.model_copy(update={"sort": [asking.order("item_id")]})):
        answer = await ask(fresh, served, asked)
        assert len(answer.items) == 10
        assert answer.total is None
        assert answer.warnings is not None
        assert ["identifiers begin so" in each.detail for each in answer.warnings] == [True]


async def test_a_starred_word_lists_every_item(fresh: Engine) -> None:
    """A list of `zeph*` has all items with such words, and its total is true."""
    served = made(*[f"zeph{n:03}" for n in range(300)], "other")
    query = asking.search(asking.who(), "zeph*", limit=1000, sort=(asking.order("title"),))
    answer = await ask(fresh, served, query)
    assert found(answer) == [str(n) for n in range(300)]
    assert answer.total == 300


# ------------------------------------------------------------------ meaning


async def test_a_search_by_meaning_in_titles_says_what_is_missing(fresh: Engine) -> None:
    """If no title has the words of a query, a warning says that only titles are compared."""
    titles = ("Star Wars", "The Terminator", "A Room with a View", "Robot dreams")
    query = asking.search(asking.who(), "a film about space war with robots")
    answer = await ask(fresh, made(*titles), query)
    assert answer.warnings is not None
    assert "no item has a description" in answer.warnings[0].detail
    assert "2" not in found(answer)
    assert (await ask(fresh, made(*titles, description="A film."), query)).warnings is None
    for text in ("terminator", "robot dreams of sheep"):
        assert (await ask(fresh, made(*titles), asking.search(asking.who(), text))).warnings is None


async def test_other_spellings_are_shown_with_the_accents_of_the_titles(fresh: Engine) -> None:
    """Words are compared without accents and shown as some title and the query have them."""
    snapshot = made("Löffel", "Großer Löffel", "Café Crème", "Käse")
    for typed, corrections, offered in (
        ("löffle", {"löffle": ["löffel"]}, None),
        ("Grosser Löffle", {"löffle": ["löffel"]}, None),
        ("crèm", {"crèm": ["crème"]}, None),  # somebody is typing
        ("löf*", None, None),
        ("Käes Café", None, "Käse Café"),
    ):
        answer = await ask(fresh, snapshot, asking.search(asking.who(), typed))
        assert (answer.corrections, answer.did_you_mean) == (corrections, offered), typed


# ------------------------------------------------------------------ filters


async def test_a_filter_that_leaves_no_word_of_the_query_is_said(fresh: Engine) -> None:
    """Items that are only near in meaning are not taken for what was asked for."""
    items = [
        Item("lamp", title="Oak Lamp", attributes={"price": 9}),
        Item("candle", title="Oak Candle", attributes={"price": 3}),
        Item("chair", title="Oak Chair", attributes={"price": 3}),
    ]
    snapshot = items
    told = "no item that passes the filter has a word of it: these are near to it in meaning"
    for text, below, is_said in (("lamp", 5, True), ("lamp", 10, False), ("candle", 5, False)):
        answer = await ask(fresh, snapshot, asking.search(asking.who(), text, filter=cheap(below)))
        assert found(answer)
        assert (told in [each.detail for each in answer.warnings or ()]) == is_said, (text, below)


def cheap(below: float) -> Condition:
    """Items of a price below this one."""
    return Condition("attributes.price", {"lt": below})


@pytest.mark.parametrize(
    ("stored", "asked", "told"),
    [
        ("TRUE", True, "true; did you mean the text 'TRUE'?"),
        ("false", False, "false; did you mean the text 'false'?"),
        (True, "True", "'True'; did you mean true, without quotation marks?"),
        (7, True, "true; its values are numbers"),
        ("yes", True, "true"),
    ],
)
def test_a_flag_that_is_stored_as_a_text_is_named(stored: object, asked: object, told: str) -> None:
    """A file's TRUE is a text until its mapping says otherwise, and equals no flag."""
    snapshot = build_snapshot([Item("a", title="A", attributes={"new": stored})], EMBEDDINGS)
    wanted = Condition("attributes.new", {"eq": asked}, {"eq": "/eq"})
    (warning,) = filter_warnings(snapshot.catalogue.fields, wanted, "/filter")
    assert warning["pointer"] == "/filter/eq"
    assert warning["detail"] == f"no item has the value of attributes.new {told}"


@pytest.mark.parametrize(
    ("asked", "hint"),
    [("foo", ""), ("leer", ""), ("lagrend", "; did you mean 'lagernd'?"), ("ena", "")],
)
def test_only_an_attribute_that_is_near_is_suggested(asked: str, hint: str) -> None:
    """A beginning that all names of attributes share makes none of them alike."""
    stored = Item("a", title="A", attributes={"ean": 1, "lagernd": True})
    fields = build_snapshot([stored], EMBEDDINGS).catalogue.fields
    wanted = Condition(f"attributes.{asked}", {"eq": 1}, {"field": "/field"})
    (warning,) = filter_warnings(fields, wanted, "/filter")
    assert warning["detail"] == f"no item has the attribute {asked!r}{hint}"
