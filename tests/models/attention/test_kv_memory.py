"""Key-value memories: frozen fields, and the errors of fields that do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from models.attention.kv_memory import KeyValueMemory


def test_a_memory_cannot_be_changed() -> None:
    """Its fields are frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        KeyValueMemory(torch.ones(1, 2, 3), torch.ones(1, 2, 3)).keys = torch.zeros(1, 2, 3)  # type: ignore[misc]


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
