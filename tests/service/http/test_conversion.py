"""The conversion of large bodies into records."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from service.domain.errors import Invalid
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


def test_a_wrong_row_ends_the_conversion() -> None:
    """The error of a row is raised with that row's position, and no later row is converted."""
    positions: list[int] = []

    def convert(position: int, row: int) -> int:
        positions.append(position)
        if row == 70:
            raise Invalid(f"/events/{position}/key", "must have 4 numbers")
        return row

    with pytest.raises(Invalid) as caught:
        asyncio.run(convert_rows(range(200), convert))
    assert caught.value.pointer == "/events/70/key"
    assert positions == list(range(71))
