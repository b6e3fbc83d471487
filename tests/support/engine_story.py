"""An engine over a data directory, for tests that ask it without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from service.domain.settings import Settings
from service.engine.engine import Engine, open_engine


def run(data: Path, story: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    """Run a story on an engine over a data directory."""

    async def main() -> None:
        engine = await open_engine(Settings(data=data))
        try:
            await story(engine)
        finally:
            await engine.close()

    asyncio.run(main())
