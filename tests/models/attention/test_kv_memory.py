"""Memories are frozen rows: every change is a new memory, and row i stays one record."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.kv_memory import KeyValueMemory


def memory(
    n: int, *, first: int = 0, ids: bool = True, bias: str = "none", heads: int = 2
) -> KeyValueMemory:
    """Rows first … first + n - 1, each number in them telling its row, head and field."""
    rows = torch.arange(first, first + n, dtype=torch.float32)
    head = torch.arange(heads) / 10
    keys = (rows[:, None] + head)[:, :, None].repeat(1, 1, 3)
    biases = {"none": None, "row": rows / 4, "head": rows / 4 + head[:, None]}
    names = tuple(f"e{i}" for i in range(first, first + n)) if ids else None
    return KeyValueMemory(keys, -keys[:, :, :2], names, biases[bias])


def whole(m: KeyValueMemory) -> None:
    """Every field of every row still tells the same number."""
    assert m.ids is not None
    numbers = torch.tensor([float(i[1:]) for i in m.ids])
    assert torch.equal(m.keys[:, 0, 0], numbers)
    assert torch.equal(m.values[:, 0, 0], -numbers)
    for head in range(m.heads):
        bias = m.bias_of(head)
        if bias is not None:
            spread = head / 10 if m.bias is not None and m.bias.dim() == 2 else 0
            torch.testing.assert_close(bias, numbers / 4 + spread)


def test_append_leaves_the_old_memory_alone() -> None:
    """The new memory has the rows of both in order; the old one is as it was."""
    old = memory(2)
    more = memory(3, first=2)
    new = old.append(more.keys, more.values, ids=more.ids)
    assert len(old) == 2
    assert new.ids == ("e0", "e1", "e2", "e3", "e4")
    whole(new)
    new.keys[0] += 1
    assert old.keys[0, 0, 0] == 0


def test_a_memory_cannot_be_changed() -> None:
    """Its fields are frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        memory(1).keys = torch.zeros(1, 2, 3)  # type: ignore[misc]


@pytest.mark.parametrize("bias", ["none", "row", "head"])
@pytest.mark.parametrize(
    "rows", [[2, 0, 2], np.array([3, 1]), torch.tensor([1]), [], np.array([], np.int64)]
)
def test_take_picks_whole_rows(rows: Any, bias: str) -> None:
    """Keys, values, ids and biases move together, in the order asked, repeats included."""
    taken = memory(4, bias=bias).take(rows)
    assert taken.ids == tuple(f"e{int(i)}" for i in rows)
    whole(taken)


@pytest.mark.parametrize("row", [-1, 4])
def test_take_refuses_rows_that_do_not_exist(row: int) -> None:
    """-1 is "none", never the last row."""
    with pytest.raises(IndexError, match=r"rows: must be within 0\.\.3"):
        memory(4).take([0, row])


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["none", "row", "head"])),
        min_size=1,
        max_size=4,
    )
)
def test_merging_counts_a_missing_bias_as_zero(parts: list[tuple[int, str]]) -> None:
    """Any mix of biases merges, and merging one by one equals concatenation."""
    merged = KeyValueMemory.empty(2, 3, 2)
    biases = []
    first = 0
    for n, kind in parts:
        part = memory(n, first=first, bias=kind)
        each = [part.bias_of(h) for h in range(2)]
        biases.append(torch.stack([torch.zeros(n) if b is None else b for b in each]))
        merged = merged.merge(part)
        first += n
    assert merged.ids == tuple(f"e{i}" for i in range(first))
    wanted = torch.cat(biases, dim=1)
    for head in range(2):
        bias = merged.bias_of(head)
        assert torch.equal(torch.zeros(first) if bias is None else bias, wanted[head])


def test_ids_may_join_an_empty_memory_without() -> None:
    """Nothing is lost when one side has no rows; otherwise both have ids or neither."""
    empty = KeyValueMemory.empty(2, 3, 2)
    assert empty.merge(memory(2)).ids == ("e0", "e1")
    assert memory(2).merge(empty).ids == ("e0", "e1")
    assert memory(2, ids=False).merge(memory(1, ids=False)).ids is None
    with pytest.raises(ValueError, match="ids: both memories must have them, or neither"):
        memory(2).merge(memory(1, ids=False))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keys": torch.zeros(3, 4)}, r"keys: must be \[n, heads, d\], got \[3, 4\]"),
        ({"keys": torch.zeros(3, 2, 4).int()}, "keys: must be floating point"),
        ({"values": torch.zeros(2, 2, 4)}, r"values: \[n, heads\] is \[2, 2\]"),
        ({"values": torch.zeros(3, 2, 4).double()}, "values: torch.float64, keys are"),
        ({"ids": ("a",)}, "ids: 1 for 3 rows"),
        ({"bias": torch.zeros(2)}, r"bias: must be \[3\] or \[2, 3\], got \[2\]"),
        ({"bias": torch.zeros(3).double()}, "bias: torch.float64, keys are"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    """Errors say which field was wrong, and how."""
    good = {"keys": torch.zeros(3, 2, 4), "values": torch.zeros(3, 2, 1)}
    with pytest.raises(ValueError, match=message):
        KeyValueMemory(**(good | fields))


def test_memories_of_other_shapes_do_not_merge() -> None:
    """Heads and dimensions must agree."""
    with pytest.raises(ValueError, match="keys: "):
        memory(1).merge(memory(1, heads=3))
