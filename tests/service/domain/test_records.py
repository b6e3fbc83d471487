"""Records and errors: equality by value, validation and pickling."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.domain.errors import HeedError, Invalid, StoreFull, Unavailable
from service.domain.records import Event, Item, User, are_plain_ids, check_event, check_id


def test_records_compare_by_value() -> None:
    """Equal arrays are equal records; another dtype's record, field or type is not."""
    one, two = np.ones(3, np.float32), np.ones(3, np.float32)
    assert Event("u", "i", key=one) == Event("u", "i", key=two)
    assert Event("u", "i", key=one) != Event("u", "i", key=2 * one)
    assert Event("u", "i", key=one) != Event("u", "i")
    assert Event("u", "i", key=one) != Event("u", "i", value=one)
    assert Item("a", attributes={"x": [1]}) == Item("a", attributes={"x": [1]})
    assert User("a") != Item("a")
    with pytest.raises(TypeError):
        hash(Event("u", "i"))


@given(st.text(st.characters(), max_size=300))
def test_ids_are_judged_by_their_bytes(text: str) -> None:
    """A string is an id exactly if UTF-8 holds it in 1 to 256 bytes, none of them zero."""
    try:
        data = text.encode()
        valid = 1 <= len(data) <= 256 and 0 not in data
    except UnicodeEncodeError:
        valid = False
    if valid:
        assert check_id(text) is text
    else:
        with pytest.raises(Invalid):
            check_id(text, "/here")


@given(st.lists(st.text(st.characters(codec=None), max_size=80) | st.integers(), max_size=4))
@example(["a", "b" * 256])
@example(["a", "b" * 257])
@example(["a", "\U0001f3ac" * 64])
@example(["a", "\U0001f3ac" * 65])
@example(["\ud83c", "\udfac"])
@example(["\u00e9", "b" * 65])
@example(["a", ""])
@example([])
def test_lists_of_plain_ids_are_known_at_once(values: list[Any]) -> None:
    """Ids are known at once if all of them are of ASCII, or of at most 64 characters each."""
    expected = True
    for value in values:
        try:
            check_id(value)
        except Invalid:
            expected = False
    texts = [str(each) for each in values]
    plain = all(map(str.isascii, texts)) or all(len(text) <= 64 for text in texts)
    assert are_plain_ids(values) is (expected and plain)


def test_errors_say_where_and_what() -> None:
    """An invalid field is a ValueError with pointer and detail, as text too."""
    with pytest.raises(ValueError, match=r"^/item_id: must be 1 to 256 bytes of UTF-8; it has 0$"):
        check_event(Event("u", ""))


@pytest.mark.parametrize(
    "error", [HeedError("d"), Invalid("/p", "d"), Unavailable("d", 7.0), StoreFull("d")]
)
def test_errors_survive_copying_and_pickling(error: HeedError) -> None:
    """Errors cross processes and keep all they say."""
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert vars(twin) == vars(error)
        assert str(twin) == str(error)
