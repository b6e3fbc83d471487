"""Items that a text finds, by their words and by the meaning of a real encoder."""

from __future__ import annotations

from models.text.static_encoder import StaticEncoder
from service.domain.records import Item
from service.engine.highlight import highlights
from service.evaluation.search_quality import build_snapshot
from service.snapshots.text_embeddings import EmbeddingCache

EMBEDDINGS = EmbeddingCache(StaticEncoder())


# ------------------------------------------------------------------ markup


def test_markup_finds_nothing_and_is_not_shown() -> None:
    """Words, meaning and highlights are of a description's text; the item itself is untouched."""
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
    assert snapshot.catalogue.titles[0] == mug.title
    shown = highlights(mug, index.match_spans(parsed))
    assert "".join(part.text for part in shown["description"]) == text
    assert [part.text for part in shown["description"] if part.match] == ["sturdy", "Gift"]
    assert "".join(part.text for part in shown["title"]) == plain.title
