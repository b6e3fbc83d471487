"""Fixtures shared by the tests of the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_disk import FaultyDisk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store's file may be made."""
    return tmp_path / "heed.db"


@pytest.fixture
def disk(request: pytest.FixtureRequest) -> FaultyDisk:
    """A disk of this test's own, whose faults are switched on and off."""
    return FaultyDisk(request.node.name)
