"""What tests of all rooms share."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support import tiny


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> tiny.World:
    """The small world with two trained models. Copy it before you change it."""
    return tiny.make(tmp_path_factory.mktemp("world") / "data")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest file, and refuse tests of one id, of which processes would run one."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")
    names = Counter(item.nodeid for item in items)
    twice = [name for name, count in names.items() if count > 1]
    if twice and hasattr(config, "workerinput"):
        raise pytest.UsageError(f"run these without -n, for they have one id: {', '.join(twice)}")
