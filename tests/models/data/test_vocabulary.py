"""Row numbers: their ids, and sets of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.vocabulary import Vocabulary, expand_ranges, sorted_union


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=3), max_size=30))
def test_rows_are_given_in_order_of_first_sight(ids: list[str]) -> None:
    vocabulary = Vocabulary()
    given_rows = [vocabulary.add(id_) for id_ in ids]
    distinct = list(dict.fromkeys(ids))
    assert given_rows == [distinct.index(id_) for id_ in ids]
    assert list(vocabulary.ids) == distinct
    assert len(vocabulary) == len(distinct)
    assert [vocabulary.id(row) for row in given_rows] == ids
    assert vocabulary.ids_of(given_rows) == ids
    assert vocabulary.rows(ids).tolist() == given_rows


def test_unknown_ids_have_no_row() -> None:
    """-1 stands for an unknown id, alone and in an array, and asking does not add it."""
    vocabulary = Vocabulary(["a", "b"])
    assert vocabulary.row("c") == -1
    rows = vocabulary.rows(["b", "c", "a", ""])
    assert rows.tolist() == [1, -1, 0, -1]
    assert rows.dtype.name == "int32"
    assert vocabulary.rows([]).shape == (0,)
    assert "a" in vocabulary
    assert "c" not in vocabulary
    assert len(vocabulary) == 2


@pytest.mark.parametrize("row", [-1, 2, 99])
def test_a_row_that_was_never_given_has_no_id(row: int) -> None:
    with pytest.raises(IndexError):
        Vocabulary(["a", "b"]).id(row)


def test_ids_must_be_distinct() -> None:
    """A vocabulary that names one id twice is refused."""
    with pytest.raises(ValueError, match="distinct"):
        Vocabulary(["a", "b", "a"])


def test_threads_agree_on_every_row() -> None:
    vocabulary = Vocabulary()
    ids = [f"i{n}" for n in range(500)]
    begin = threading.Barrier(4)
    seen: list[list[int]] = []

    def add(order: list[str]) -> None:
        begin.wait()
        rows = {id_: vocabulary.add(id_) for id_ in order}
        seen.append([rows[id_] for id_ in ids])

    orders = [ids, ids[::-1], ids[250:] + ids[:250], ids]
    threads = [threading.Thread(target=add, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert sorted(seen[0]) == list(range(500))
    assert [vocabulary.id(row) for row in seen[0]] == ids


@pytest.mark.parametrize("sizes", [(0,), (0, 0), (1, 0), (5, 7, 3), (200, 300)])
def test_rows_are_united_as_sets_are(sizes: tuple[int, ...]) -> None:
    """`sorted_union` returns the distinct rows of all parts in ascending order."""
    generator = np.random.default_rng(sum(sizes))
    parts = [generator.integers(0, 50, size) for size in sizes]
    found = sorted_union(*parts)
    assert found.tolist() == sorted({row for part in parts for row in part.tolist()})
    assert found.dtype == np.int64


def test_ranges_are_laid_end_to_end() -> None:
    """`expand_ranges` returns each range's elements in turn, and which range each is from."""
    index, elements = expand_ranges(np.array([5, 9, 0, 5]), np.array([2, 0, 3, 1]))
    assert index.tolist() == [0, 0, 2, 2, 2, 3]
    assert elements.tolist() == [5, 6, 0, 1, 2, 5]
