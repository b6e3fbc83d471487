"""The conversion of large bodies into records."""

from __future__ import annotations

import asyncio
import itertools

from service.http.routes.record_bodies import convert_rows


def test_other_work_runs_while_rows_are_converted() -> None:
    """A thousand rows come back in order, and other tasks run many times among them."""

    async def test() -> None:
        converted = 0
        seen: list[int] = []

        def convert(position: int, row: str) -> str:
            nonlocal converted
            converted += 1
            return f"{position}:{row}"

        async def watch() -> None:
            while converted < 1_000:
                seen.append(converted)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        rows = [f"row-{n}" for n in range(1_000)]
        records = await convert_rows(rows, convert)
        await watching
        assert records == [f"{n}:row-{n}" for n in range(1_000)]
        assert len(seen) >= 10
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 100

    asyncio.run(test())
