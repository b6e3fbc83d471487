"""Import of items as a stream of lines (NDJSON) of any length, stored in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.domain.errors import Crowded, HeedError, Invalid
from service.domain.records import Item, parse_json
from service.domain.settings import Settings
from service.http.problems import answer, located, sentence
from service.http.routes.context import Context, Json
from service.http.routes.record_bodies import ItemIn
from service.snapshots.catalogue_refresh import CatalogueRefresh

BATCH = 500
MAX_ERRORS = 100


async def split_lines(
    chunks: AsyncIterator[bytes], longest: int
) -> AsyncIterator[tuple[int, bytes | None]]:
    """Each line with its number from 1, without its newline; None for one that is too long.

    A line beyond `longest` bytes is not kept while the rest of it goes by. The last line needs no
    newline; blank ones are counted and left out.
    """
    number, held, too_long = 1, bytearray(), False
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            held += end
            if too_long or len(held) > longest:
                yield number, None
            elif held.strip():
                yield number, bytes(held)
            number, held, too_long = number + 1, bytearray(), False
        held += rest
        if len(held) > longest:
            too_long = True
            held.clear()
    if too_long:
        yield number, None
    elif held.strip():
        yield number, bytes(held)


@dataclass
class _Import:
    """One stream on its way into the catalogue."""

    catalogue: CatalogueRefresh
    settings: Settings
    stored: int = 0
    failed: int = 0
    errors: list[dict[str, object]] = field(default_factory=list)
    batch: list[tuple[int, Item]] = field(default_factory=list)

    def read(self, number: int, line: bytes | None) -> None:
        """Add a line to the batch, or its error to the errors."""
        if line is None:
            self.fail(number, f"is longer than {self.settings.max_ndjson_line_bytes} bytes")
            return
        try:
            item = ItemIn.model_validate(parse_json(line))
            self.batch.append((number, item.to_item(self.settings.embedding_dim)))
        except orjson.JSONDecodeError as error:
            self.fail(number, f"is not JSON: {error}")
        except ValidationError as error:
            found = error.errors(include_url=False)
            self.fail(number, sentence(located(found, "body"), len(found)))
        except Invalid as error:
            self.fail(number, str(error))

    async def flush(self) -> None:
        """Store the batch. Raises what the store raises, but for `Invalid`."""
        batch, self.batch = self.batch, []
        if not batch:
            return
        try:
            items = [item for _, item in batch]
            self.stored += await self.catalogue.put_items(items)
        except Invalid:
            # A batch is all or nothing; a stream is line by line, so find the one to blame.
            for number, item in batch:
                try:
                    self.stored += await self.catalogue.put_items([item])
                except Invalid as error:
                    self.fail(number, str(error))

    def fail(self, number: int, detail: str) -> None:
        """Count a line out, and say why for the first of them."""
        self.failed += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"line": number, "detail": detail})

    def report(self) -> dict[str, object]:
        """A `StoredLines`."""
        return {"stored": self.stored, "failed": self.failed, "errors": self.errors}


async def store_stream(context: Context) -> Response:
    """Store each line that is an item; answer how many were, and what was wrong with the others.

    Where the store fails the stream ends with that problem, and `stored` says how many items had
    been stored by then; where its client is too slow, all lines that were complete are stored.
    Sending a stream again is harmless: items replace themselves.
    """
    work = _Import(context.engine.live.catalogue, context.settings)
    cut: Exception | None = None
    try:
        try:
            await _read(context, work)
        except (HTTPException, Crowded) as error:  # of the client
            cut = error
        async with context.bulk_turn():
            with context.stages("store"):
                await work.flush()
    except HeedError as error:
        cut = error
    report = work.report()
    return Json(report) if cut is None else answer(context.scope, cut, **report)


async def _read(context: Context, work: _Import) -> None:
    """Read all lines; store every batch except the last."""
    stages = context.stages
    longest = context.settings.max_ndjson_line_bytes
    async for number, line in split_lines(context.stream(), longest):
        with stages("parse"):
            work.read(number, line)
        if len(work.batch) >= BATCH:
            async with context.bulk_turn():  # questions that wait come first
                with stages("store"):
                    await work.flush()
        elif number % BATCH == 0:
            await asyncio.sleep(0)  # wrong lines wait for nothing: let other tasks run
