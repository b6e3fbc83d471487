"""The catalogue: changes compared with a plain dict, and filters with brute force."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.catalogue import cow
from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import EMBEDDING, ItemEntry
from models.data.vocabulary import Vocabulary
from tests.support.small import DIMENSION, encode

quick = settings(max_examples=60, deadline=None, derandomize=True)

IDS = [f"i{n}" for n in range(6)]
TEXTS = ["", " ", "!!", "jazz", "jazz", "piano", "a long talk", "blues"]
CATEGORIES = ["a", "b", "c"]


def vector(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=DIMENSION).astype(np.float32)


attributes = st.dictionaries(
    st.sampled_from(["language", "year", "tags"]),
    st.sampled_from(["en", "nl", 1, 1.0, True, False, None, ["en", "nl"], [1, "x"], []]),
    max_size=2,
)
items = st.builds(
    ItemEntry,
    item_id=st.sampled_from(IDS),
    title=st.sampled_from(["one", "two"]),
    fields=st.dictionaries(
        st.sampled_from(["title", "description", "tags"]), st.sampled_from(TEXTS), max_size=3
    ),
    categories=st.lists(st.sampled_from(CATEGORIES), max_size=3),
    attributes=attributes,
    embedding=st.one_of(st.none(), st.builds(vector, st.integers(0, 3))),
    hidden=st.booleans(),
    published_at=st.one_of(st.none(), st.integers(-5, 5)),
)
changes = st.lists(
    st.tuples(st.lists(items, max_size=4), st.lists(st.sampled_from([*IDS, "never"]), max_size=2)),
    max_size=5,
)


def build(*entries: ItemEntry) -> Catalogue:
    return Catalogue.empty(DIMENSION).updated(entries, [], encode)


def apply(
    known: dict[str, ItemEntry], entries: Sequence[ItemEntry], removed: Sequence[str]
) -> None:
    """One change to a plain dict of items."""
    for id_ in removed:
        known.pop(id_, None)
    for entry in entries:
        known[entry.item_id] = entry


def keys_of(entry: ItemEntry) -> list[tuple[str, NDArray[np.float32]]]:
    """What an item's keys must be: field name and unit vector."""
    keys = [(name, encode([text])[0]) for name, text in entry.fields.items()]
    if entry.embedding is not None:
        wide = entry.embedding.astype(np.float64)
        keys.append((EMBEDDING, (wide / np.linalg.norm(wide)).astype(np.float32)))
    return [(name, key) for name, key in keys if key.any()]


def agree(catalogue: Catalogue, known: dict[str, ItemEntry]) -> None:
    """Assert that rows, keys and postings of the catalogue match a plain dict of items."""
    shared = Counter(
        key.round(5).tobytes() for entry in known.values() for _, key in keys_of(entry)
    )
    for row in range(len(catalogue)):
        entry = known.get(catalogue.vocabulary.id(row))
        places = np.flatnonzero(catalogue.keys.owners == row)
        if entry is None:
            assert not catalogue.visible[row]
            assert not catalogue.has_content[row]
            assert not catalogue.content[row].any()
            assert catalogue.titles[row] == ""
            assert len(places) == 0
            continue
        expected = keys_of(entry)
        assert catalogue.titles[row] == entry.title
        assert catalogue.visible[row] == (not entry.hidden)
        assert catalogue.attributes[row] == entry.attributes
        assert catalogue.has_content[row] == bool(expected)
        found = {catalogue.keys.names[catalogue.keys.codes[place]]: place for place in places}
        assert set(found) == {name for name, _ in expected}
        assert len(found) == len(expected) == len(places)
        total = np.zeros(DIMENSION)
        for name, key in expected:
            np.testing.assert_allclose(catalogue.keys.vectors[found[name]], key, atol=1e-6)
            many = shared[key.round(5).tobytes()]
            assert catalogue.keys.log_frequency[found[name]] == pytest.approx(
                math.log(many), abs=1e-6
            )
            total += key
        length = np.linalg.norm(total)
        np.testing.assert_allclose(catalogue.content[row], total / (length or 1), atol=1e-5)
    for category in CATEGORIES:
        members = [row for row in range(len(catalogue))
                   if (entry := known.get(catalogue.vocabulary.id(row)))
                   and category in entry.categories]  # fmt: skip
        assert np.flatnonzero(catalogue.in_categories([category])).tolist() == members


@pytest.mark.parametrize("small", [0, cow.SMALL])
@quick
@given(series=changes)
def test_any_changes_leave_what_a_dict_would(
    small: int, series: list[tuple[list[ItemEntry], list[str]]]
) -> None:
    """After upserts and removals the catalogue matches a dict, and earlier views are unchanged.

    Whether the rows are copied, or mapped as those of large catalogues are.
    """
    catalogue, known = Catalogue.empty(DIMENSION), dict[str, ItemEntry]()
    views = [catalogue]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cow, "SMALL", small)
        for entries, removed in series:
            old = [frozen(view) for view in views]
            catalogue = catalogue.updated(entries, removed, encode)
            apply(known, entries, removed)
            agree(catalogue, known)
            for view, was in zip(views, old, strict=True):
                assert_same(frozen(view), was)
            changed = catalogue.changed_since(views[-1])
            assert changed is not None
            assert set(changed.tolist()) >= differing(views[-1], catalogue)
            compact = views[-1].keys.compacted()
            assert compact.orphans == 0
            agree(catalogue.with_keys(catalogue.keys.compacted()), known)
            agree(catalogue.with_keys(catalogue.keys.rebased(views[-1].keys, compact)), known)
            views.append(catalogue)


def frozen(catalogue: Catalogue) -> dict[str, Any]:
    """Return a copy of all data of a catalogue."""
    arrays = ("content", "has_content", "present", "deleted", "visible", "published")
    fields = ("vectors", "owners", "codes", "log_frequency")
    return {
        **{name: getattr(catalogue, name).copy() for name in arrays},
        **{name: getattr(catalogue.keys, name).copy() for name in fields},
        "spans": [
            catalogue.keys.positions_of(np.array([row]))[0].tolist()
            for row in range(len(catalogue))
        ],
        "titles": list(catalogue.titles),
        "attributes": list(catalogue.attributes),
        "names": catalogue.keys.names,
        "categories": {name: catalogue.in_categories([name]).tolist() for name in CATEGORIES},
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two copies are equal bit for bit."""
    for name, value in one.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, other[name])
        else:
            assert value == other[name]


def differing(old: Catalogue, new: Catalogue) -> set[int]:
    """Return the rows whose vectors differ between two views, and the rows of the later alone."""
    return {
        row
        for row in range(len(new))
        if row >= len(old) or not np.array_equal(old.content[row], new.content[row])
    }


def test_changes_are_known_since_the_latest_views_alone() -> None:
    """`changed_since` returns None for an old view and for another catalogue."""
    first = Catalogue.empty(DIMENSION).updated([ItemEntry("a", "a", {"title": "a"})], [], encode)
    later = first
    for count in range(9):
        title = f"b{count}"
        later = later.updated([ItemEntry("b", title, {"title": title})], [], encode)
    assert first.changed_since(first) is not None
    assert later.changed_since(first) is None
    assert later.changed_since(Catalogue.empty(DIMENSION)) is None


# ---------------------------------------------------------------------------- filters


def test_no_filter_lets_every_listed_item_pass() -> None:
    """Without a filter every visible item passes, but no hidden, removed or unlisted item."""
    catalogue = build(ItemEntry("a"), ItemEntry("b", hidden=True), ItemEntry("c")).updated(
        [], ["c"], encode
    )
    catalogue = catalogue.with_items(["event"])
    assert catalogue.allowed().tolist() == [True, False, False, False]


def test_a_filter_does_not_write_into_the_catalogue() -> None:
    """The mask returned by a filter is a copy."""
    catalogue = build(ItemEntry("a"))
    catalogue.allowed()[:] = False
    assert catalogue.visible.tolist() == [True]


# ---------------------------------------------------------------------------- keys


def test_an_empty_vocabulary_is_the_one_that_grows() -> None:
    """A catalogue extends the vocabulary that it is given."""
    shared = Vocabulary()
    made = Catalogue.empty(DIMENSION, shared).updated(
        [ItemEntry("a", "a", {"title": "a"})], [], encode
    )
    assert made.vocabulary is shared
    assert shared.row("a") == made.row("a") == 0


def test_keys_are_unit_vectors_whatever_the_encoder_gives() -> None:
    def rough(texts: Sequence[str]) -> NDArray[np.float32]:
        return 3 * encode(texts).astype(np.float16).astype(np.float32)

    entries = [ItemEntry("a", fields={"title": "jazz", "tags": "?"}), ItemEntry("b")]
    made = Catalogue.empty(DIMENSION).updated(entries, [], rough)
    np.testing.assert_allclose(np.linalg.norm(made.keys.vectors, axis=1), [1], atol=1e-6)
    np.testing.assert_allclose(made.keys.vectors[0], encode(["jazz"])[0], atol=1e-3)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_brought_embedding_is_a_key_of_unit_length(size: float) -> None:
    """Whatever its length, a single direction; its squares need not fit float32."""
    brought = (size * vector(1)).astype(np.float32)
    catalogue = build(ItemEntry("a", embedding=brought))
    wide = vector(1).astype(np.float64)
    expected = wide / np.linalg.norm(wide)
    np.testing.assert_allclose(catalogue.keys.vectors[0], expected, atol=1e-6)
    np.testing.assert_allclose(catalogue.content[0], expected, atol=1e-6)
    assert catalogue.keys.names == (EMBEDDING,)


def test_a_zero_embedding_is_no_key() -> None:
    catalogue = build(ItemEntry("a", embedding=np.zeros(DIMENSION, np.float32)))
    assert not catalogue.has_content.any()
    assert len(catalogue.keys) == 0


def test_an_embedding_of_another_dimension_is_refused() -> None:
    catalogue = build(ItemEntry("a", fields={"title": "jazz"}))
    before = frozen(catalogue)
    with pytest.raises(ValueError, match=f"dimension 3, not {DIMENSION}"):
        catalogue.updated([ItemEntry("b", embedding=np.ones(3, np.float32))], [], encode)
    assert_same(frozen(catalogue), before)


def test_only_what_changed_is_encoded() -> None:
    """An update encodes the texts of its own items, and a removal none."""
    asked: list[str] = []

    def spy(texts: Sequence[str]) -> NDArray[np.float32]:
        asked.extend(texts)
        return encode(texts)

    first = Catalogue.empty(DIMENSION).updated(
        [ItemEntry(f"i{n}", fields={"title": f"title {n}"}) for n in range(3)], [], spy
    )
    assert asked == ["title 0", "title 1", "title 2"]
    asked.clear()
    second = first.updated([ItemEntry("i1", fields={"title": "new"})], ["i2"], spy)
    assert asked == ["new"]
    np.testing.assert_array_equal(second.content[0], first.content[0])


# ---------------------------------------------------------------------------- rows


def test_a_view_knows_only_the_rows_it_has() -> None:
    """Ids that came later are unknown to an earlier view of the same vocabulary."""
    early = build(ItemEntry("a"))
    late = early.updated([ItemEntry("b")], [], encode)
    assert (early.row("b"), late.row("b")) == (-1, 1)
    assert early.rows(["b", "a", "c"]).tolist() == [-1, 0, -1]
    assert late.rows(["b", "a", "c"]).tolist() == [1, 0, -1]
    assert late.rows([]).shape == (0,)


def test_with_items_adds_unlisted_rows() -> None:
    """`with_items` adds invisible rows for unknown ids and is idempotent."""
    catalogue = build(ItemEntry("a", "A", fields={"title": "jazz"}))
    wider = catalogue.with_items(["x", "a", "x"])
    assert (len(catalogue), len(wider)) == (1, 2)
    assert wider.visible.tolist() == [True, False]
    assert wider.with_items(["a", "x"]) is wider
    agree(wider, {"a": ItemEntry("a", "A", fields={"title": "jazz"})})


def test_no_change_is_the_same_view() -> None:
    """An empty update returns the same view; removing an unknown id changes no data."""
    catalogue = build(ItemEntry("a", fields={"title": "jazz"}))
    assert catalogue.updated([], [], encode) is catalogue
    assert_same(frozen(catalogue.updated([], ["never"], encode)), frozen(catalogue))
