"""Engines over data directories, asked without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.engine.engine import Engine
from tests.support.engine_story import opened
from tests.support.tiny import World


@pytest.fixture(params=[True, False], ids=["trained", "untrained"])
def data(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Path:
    """The small world, with a model or without."""
    return world.copy(tmp_path / "data", trained=request.param)


@pytest.fixture
async def engine(data: Path) -> AsyncIterator[Engine]:
    """An engine over the small world, with a model or without."""
    async with opened(data) as engine:
        yield engine


@pytest.fixture
async def trained(world: World, tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine over the small world, with a model."""
    async with opened(world.copy(tmp_path / "data")) as engine:
        yield engine


@pytest.fixture
async def fresh(tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine over an empty data directory."""
    async with opened(tmp_path) as engine:
        yield engine
