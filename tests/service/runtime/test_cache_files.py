"""Files of derived data: what is read is what was written, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from service.runtime.cache_files import CacheFiles

DATA = np.random.default_rng(0).integers(0, 256, 5_000).astype(np.uint8)


def test_bytes_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Another process reads the same bytes under the same key, and none under another."""
    CacheFiles(tmp_path / "cache", 3).write("one", DATA)
    read = CacheFiles(tmp_path / "cache", 3).read("one")
    assert read is not None
    assert np.array_equal(read, DATA)
    assert CacheFiles(tmp_path / "cache", 3).read("two") is None


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, seed: int) -> None:
    """A file with a flipped bit or without its end is not returned, and can be written again."""
    cache = CacheFiles(tmp_path, 3)
    cache.write("one", DATA)
    rng = np.random.default_rng(seed)
    content = bytearray((tmp_path / "one").read_bytes())
    at = int(rng.integers(len(content)))
    if seed % 2:
        content[at] ^= 1 << int(rng.integers(8))
    else:
        del content[at:]
    (tmp_path / "one").write_bytes(content)
    assert cache.read("one") is None
    cache.write("one", DATA)
    again = cache.read("one")
    assert again is not None
    assert np.array_equal(again, DATA)


def test_the_files_used_last_are_kept(tmp_path: Path) -> None:
    """Beyond the most, the file that was written or read longest ago goes."""
    cache = CacheFiles(tmp_path, 2)
    for age, key in enumerate(("one", "two")):
        cache.write(key, DATA)
        os.utime(tmp_path / key, (1_000 + age, 1_000 + age))
    assert cache.read("one") is not None
    cache.write("three", DATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three"]


def test_a_folder_that_cannot_be_written_costs_the_cache_alone(tmp_path: Path) -> None:
    """If a file has the name of the folder, nothing is kept, and nothing raises."""
    (tmp_path / "cache").write_text("a file")
    cache = CacheFiles(tmp_path / "cache", 2)
    cache.write("one", DATA)
    assert cache.read("one") is None
