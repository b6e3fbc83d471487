"""Strings of a vocabulary that grows, searched by several readers at once."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import numpy as np
import pytest

from models.catalogue.fields import keyword_column as folded_strings
from models.catalogue.fields.keyword_column import FoldedStrings
from models.data.vocabulary import Vocabulary


@pytest.fixture
def strings(monkeypatch: pytest.MonkeyPatch) -> FoldedStrings:
    """Ten strings, in blocks of four."""
    monkeypatch.setattr(folded_strings, "_BLOCK", 4)
    return FoldedStrings(Vocabulary(f"String {at}" for at in range(10)))


def found(strings: FoldedStrings, part: str, count: int) -> list[int]:
    """The places of the strings that contain another."""
    return np.flatnonzero(strings.containing(part, count)).tolist()


def test_an_older_catalogue_is_searched_after_a_newer_one(strings: FoldedStrings) -> None:
    """Strings that only the newer one has are not found, and are no error."""
    assert found(strings, "STRING", 10) == [*range(10)]
    assert found(strings, "string", 6) == [*range(6)]
    assert found(strings, "string 7", 6) == []
    assert len(strings.containing("string", 6)) == 6


def test_searches_at_once_find_what_one_finds(strings: FoldedStrings) -> None:
    """Two threads that fold the same strings, line by line in step, do not keep them twice."""

    def slowly(frame: FrameType, _event: str, _value: object) -> object:
        is_own = frame.f_code.co_filename == folded_strings.__file__
        if is_own and not frame.f_code.co_name.startswith("<"):
            time.sleep(0.02)
        return slowly

    tracer = sys.gettrace()
    barrier = threading.Barrier(2)

    def search() -> None:
        barrier.wait()
        sys.settrace(slowly)  # type: ignore[arg-type]
        try:
            strings.containing("string", 4)
        finally:
            sys.settrace(tracer)

    with ThreadPoolExecutor(2) as threads:
        for search_ in [threads.submit(search) for _ in range(2)]:
            search_.result()
    for at in range(10):
        assert found(strings, f"string {at}", 10) == [at]
