"""An engine over a data directory, for tests that ask it without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from service.domain.settings import Settings
from service.engine.engine import Engine, open_engine
from service.snapshots.live_snapshot import Served


@asynccontextmanager
async def opened(data: Path, preloaded: Served | None = None) -> AsyncIterator[Engine]:
    """Open an engine, which is closed with the block."""
    engine = await open_engine(Settings(data=data), preloaded=preloaded)
    try:
        yield engine
    finally:
        await engine.close()
