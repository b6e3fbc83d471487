"""The fault matrix at a small scale: its rows run, and its weaker modes break what they must."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import serving, writing
from tests.faults.matrix import Setup
from tests.support.tiny import World


@pytest.fixture
def setup(tmp_path: Path, world: World) -> Setup:
    """A row's setup at a hundredth of the matrix."""
    return Setup(tmp_path, seed=1, scale=0.01, world=world)


def test_clients_that_leave(setup: Setup) -> None:
    """A hundred questions of mixed users, two fifths of which are dropped, mix nothing up."""
    assert serving.disconnected(setup).proven


def test_an_early_acknowledgement_is_a_loss(tmp_path: Path) -> None:
    """The journal counts a batch as lost that was acknowledged and is not in the store."""
    path, journal = tmp_path / "heed.db", tmp_path / "journal"
    child = writing.start(path, journal, 1)
    while not journal.exists() or journal.stat().st_size < 1_000:
        assert child.is_alive()
    child.kill()
    child.join()
    assert writing.lost(path, journal) == 0
    with journal.open("a") as file:
        file.write("try never 3\nack never 3\n")
    assert writing.lost(path, journal) == 1


def test_acknowledgements_after_a_failed_commit_are_counted(tmp_path: Path) -> None:
    """A refusal may precede acknowledgements of earlier commits, a failed commit may not."""
    path = tmp_path / "journal"
    earlier = "try a 1\ntry b 1\nrefused Unavailable\nack a 1\n"
    path.write_text(earlier + "err Unavailable\n")
    assert writing.Journal(path).acks_after_error() == 0
    path.write_text(earlier + "err Unavailable\nack b 1\n")
    assert writing.Journal(path).acks_after_error() == 1
    path.write_text(earlier + "try c 1\nack c 1\n")
    assert writing.Journal(path).acks_after_error() == 1
