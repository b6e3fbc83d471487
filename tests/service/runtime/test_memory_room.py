"""Room in memory, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

from service.runtime.memory import memory_room

MIB = 1 << 20


def test_the_tighter_limit_counts(tmp_path: Path) -> None:
    """A container's limit less what it took, or what the machine has left, whichever is less."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable: 1048576 kB\n")
    assert memory_room(tmp_path, meminfo) == 1024 * MIB
    (tmp_path / "memory.max").write_text(f"{400 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {50 * MIB}\n")
    assert memory_room(tmp_path, meminfo) == 150 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_room(tmp_path, meminfo) == 1024 * MIB


def test_unknown_limits(tmp_path: Path) -> None:
    """Without any of the files nothing is claimed."""
    assert memory_room(tmp_path, tmp_path / "missing") is None
