"""Immutability, merging and validation of key-value memories."""

from __future__ import annotations

import dataclasses
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.kv_memory import KeyValueMemory


def memory(n: int, *, first: int = 0, bias: str = "none", heads: int = 2) -> KeyValueMemory:
    """Rows first … first + n - 1, each number in them naming its row, head and field."""
    rows = torch.arange(first, first + n, dtype=torch.float32)
    head = torch.arange(heads) / 10
    keys = (rows[:, None] + head)[:, :, None].repeat(1, 1, 3)
    biases = {"none": None, "row": rows / 4, "head": rows / 4 + head[:, None]}
    return KeyValueMemory(keys, -keys[:, :, :2], biases[bias])


def test_a_merge_leaves_both_memories_alone() -> None:
    """A merge returns the rows of both memories in order and changes neither."""
    old = memory(2)
    new = old.merge(memory(3, first=2))
    assert (len(old), len(new)) == (2, 5)
    assert new.keys[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert new.values[:, 0, 0].tolist() == [0, -1, -2, -3, -4]
    new.keys[0] += 1
    assert old.keys[0, 0, 0] == 0


def test_a_memory_cannot_be_changed() -> None:
    """Its fields are frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        memory(1).keys = torch.zeros(1, 2, 3)  # type: ignore[misc]


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
    memories, first = [], 0
    for n, kind in parts:
        memories.append(memory(n, first=first, bias=kind))
        first += n
    merged = reduce(KeyValueMemory.merge, memories)
    assert merged.keys[:, 0, 0].tolist() == list(range(first))
    for head in range(2):
        biases = [(each.head_bias(head), len(each)) for each in memories]
        wanted = torch.cat([torch.zeros(n) if bias is None else bias for bias, n in biases])
        bias = merged.head_bias(head)
        assert torch.equal(torch.zeros(first) if bias is None else bias, wanted)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keys": torch.zeros(3, 4)}, r"keys: must be \[n, heads, d\], got \[3, 4\]"),
        ({"keys": torch.zeros(3, 2, 4).int()}, "keys: must be floating point"),
        ({"values": torch.zeros(2, 2, 4)}, r"values: \[n, heads\] is \[2, 2\]"),
        ({"values": torch.zeros(3, 2, 4).double()}, "values: torch.float64, keys are"),
        ({"bias": torch.zeros(2)}, r"bias: must be \[3\] or \[2, 3\], got \[2\]"),
        ({"bias": torch.zeros(3).double()}, "bias: torch.float64, keys are"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    """Errors say which field was wrong, and how."""
    good = {"keys": torch.zeros(3, 2, 4), "values": torch.zeros(3, 2, 1)}
    with pytest.raises(ValueError, match=message):
        KeyValueMemory(**(good | fields))


def test_memories_of_other_shapes_do_not_merge() -> None:
    """Merging memories of different numbers of heads is refused."""
    with pytest.raises(ValueError, match="keys: "):
        memory(1).merge(memory(1, heads=3))
