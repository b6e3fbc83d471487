"""What tests of all rooms share."""

from __future__ import annotations

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> tiny.World:
    """The small world with two trained models. Copy it before you change it."""
    return tiny.make(tmp_path_factory.mktemp("world") / "data")
