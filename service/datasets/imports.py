"""Import of a data set or of profiles into a store, with warnings and a file of rejected rows."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from service.datasets.base import Dataset, batches
from service.datasets.cells import shortened
from service.datasets.formats import Row, row_text
from service.datasets.record_files import ItemsFile, UsersFile
from service.domain.records import Event, Item
from service.domain.timestamps import to_rfc3339
from service.stores.base import Store
from service.stores.values import AppendResult

T = TypeVar("T")
Through = Callable[[Iterable[T]], Iterator[T]]
Progress = Callable[[str, int], None]
"""Called after each batch with "items", "events" or "profiles" and the rows handled."""

_BATCH = 4_000  # events of one transaction, ~0.1 s: other processes that write wait for it
_GAP = 0.004  # seconds between two transactions, in which a process that waits can begin its own
_PATCHES = 1_000  # items of one transaction
_USERS = 1_000  # profiles stored concurrently


@dataclass(frozen=True, slots=True)
class ImportResult:
    items: int
    events: int
    duplicates: int
    seconds: float

    def __str__(self) -> str:
        parts = []
        if self.events or self.duplicates:
            parts = [f"{self.events:,} events stored", f"{self.duplicates:,} were there already"]
        if self.items:
            parts.insert(0, f"{self.items:,} items" if parts else f"{self.items:,} items stored")
        return f"{', '.join(parts) or 'nothing to store'}, in {self.seconds:.1f} s"


async def import_dataset(
    store: Store,
    source: Dataset,
    progress: Progress = lambda *_: None,
    *,
    import_id: int | None = None,
    items_through: Through[Item] = iter,
    events_through: Through[Event] = iter,
) -> ImportResult:
    """Store all items, then all events; rows that are already stored change nothing.

    `import_id` is of `Store.begin_import`; items and events pass through `items_through` and
    `events_through`.
    """
    started = time.monotonic()
    items = stored = duplicates = 0
    for batch in batches(items_through(source.items()), 1_000, source.progress):
        items += await _uncut(store.put_items(batch, import_id=import_id))
        progress("items", items)
        await asyncio.sleep(_GAP)
    storing: asyncio.Task[AppendResult] | None = None

    async def settle() -> None:
        nonlocal storing, stored, duplicates
        if storing is not None:
            appended = await _uncut(storing)
            storing = None
            stored, duplicates = stored + appended.stored, duplicates + appended.duplicates
            progress("events", stored + duplicates)

    try:
        # While the writer's thread stores one batch, the next is read.
        for events in batches(events_through(source.events()), _BATCH, source.progress):
            await settle()
            await asyncio.sleep(_GAP)
            storing = asyncio.create_task(store.append(events, import_id=import_id))
            await asyncio.sleep(0)
    finally:
        await settle()
    return ImportResult(items, stored, duplicates, time.monotonic() - started)


async def import_patches(
    store: Store,
    source: ItemsFile,
    progress: Progress = lambda *_: None,
    *,
    import_id: int | None = None,
) -> int:
    """Apply the rows of a file as changes of items, and return the number of rows."""
    count = 0
    for batch in batches(source.patches(), _PATCHES, source.progress):
        await _uncut(store.patch_items(batch, import_id=import_id))
        count += len(batch)
        progress("items", count)
        await asyncio.sleep(_GAP)
    return count


async def import_users(
    store: Store,
    source: UsersFile,
    progress: Progress = lambda *_: None,
    *,
    import_id: int | None = None,
) -> int:
    """Store all profiles and return their number. The last one of a user wins."""
    count = 0
    for batch in batches(source.records(), _USERS, source.progress):
        # Concurrently, since writes that wait together share a commit; the writer keeps the order.
        writes = (store.put_user(user, import_id=import_id) for user in batch)
        await _uncut(asyncio.gather(*writes))
        count += len(batch)
        progress("profiles", count)
        await asyncio.sleep(_GAP)
    return count


async def _uncut(write: Awaitable[T]) -> T:
    """Finish a write although Ctrl-C cancels this task; the next await raises the cancellation."""
    task = asyncio.ensure_future(write)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        result = await task
        if (current := asyncio.current_task()) is not None:
            current.uncancel()
            current.cancel()
        return result


MAX_WEIGHT = 1_000.0
_MARKS = re.compile(r"[;|,\n\t\[{]")
_WORDS = ";|\n\t"
_GROUPS = re.compile(r"\d{1,3}(,\d{3})+")  # 1,234 is a number
_UNSEEN = re.compile("[\u00a0\u00ad\u200b-\u200f\u2060\ufeff]")  # no-break, zero-width
_EXAMPLES = 5
_CHUNK = 10_000  # ids that are looked up at once
_BETWEEN = re.compile(r"[\s,/+&]+")  # ids in one cell, if the catalogue has them
_COMPARED = 1_000  # unknown ids at most of which other spellings are looked up
_DIGITS = 14  # of the longest common number of a product, GTIN-14


class ImportWarnings:
    """Collects what is odd about the items and events of an import, as they pass through."""

    def __init__(self) -> None:
        self.types: Counter[str] = Counter()  # of events
        self._now = time.time_ns() // 1_000
        self._seen: dict[str, int] = {}  # events of each item
        self._listed: set[str] = set()  # items of this import
        self._counts: Counter[str] = Counter()
        self._examples: defaultdict[str, list[Any]] = defaultdict(list)
        self._categories: dict[str, dict[str, None]] = {}

    def events(self, stream: Iterable[Event]) -> Iterator[Event]:
        """Yield the events unchanged."""
        for event in stream:
            self.types[event.type] += 1
            if event.item_id not in self._seen and _is_list(event.item_id):
                self._note("lists", event.item_id)
            self._seen[event.item_id] = self._seen.get(event.item_id, 0) + 1
            if event.timestamp is None:
                self._counts["timeless"] += 1
            elif event.timestamp > self._now:
                self._note("future", event.timestamp)
            if event.weight > MAX_WEIGHT:
                self._note("heavy", event.weight)
            yield event

    def items(self, stream: Iterable[Item]) -> Iterator[Item]:
        """Yield the items unchanged."""
        for item in stream:
            if item.item_id in self._listed:
                self._note("again", item.item_id)
            self._listed.add(item.item_id)
            if _is_list(item.item_id):
                self._note("lists", item.item_id)
            if not item.title.strip():
                self._note("nameless", item.item_id)
            for name in item.categories:
                self._categories.setdefault(name.casefold(), {})[name] = None
            yield item

    async def messages(self, store: Store) -> list[str]:
        """Return a message for each kind of oddity; the store says which items are known."""
        found = []
        unknown = await unknown_items(store, (i for i in self._seen if i not in self._listed))
        for item_id in await self._joined(store, unknown):
            self._note("lists", item_id)
        if self._counts["lists"]:
            found.append(
                f"item ids that look like lists: {self._named('lists', shortened)}; an id is one "
                "item: write a row for each"
            )
        if unknown:
            events = sum(self._seen[item_id] for item_id in unknown)
            names = listed(map(repr, unknown), len(unknown))
            found.append(
                f"items of events that are not in the catalogue: {len(unknown):,}, of {events:,} "
                f"events: {names}; they are stored, and recommended once the catalogue has them; "
                "--create-items makes items of them"
            )
            if warning := await spelling_warning(store, unknown, self._listed):
                found.append(warning)
        timeless = self._counts["timeless"]
        if 0 < timeless < self.types.total():
            found.append(
                f"events without a time: {timeless:,} of {self.types.total():,}; they get the time "
                "of the import, and so are the newest of their users in answers; a training takes "
                "such events, from a tenth of the log, for older than all others"
            )
        if self._counts["future"]:
            found.append(f"events in the future: {self._named('future', to_rfc3339)}")
        if self._counts["heavy"]:
            found.append(
                f"events of a weight above {MAX_WEIGHT:,.0f}: "
                f"{self._named('heavy', '{:,.6g}'.format)}; --weight-from COLUMN:log takes "
                "logarithms"
            )
        if self._counts["nameless"]:
            found.append(f"items without a title: {self._named('nameless', repr)}")
        if self._counts["again"]:
            found.append(
                f"items of an earlier file of this import: {self._named('again', repr)}; the "
                "later file replaces them"
            )
        alike = [" and ".join(map(repr, n)) for n in self._categories.values() if len(n) > 1]
        if alike:
            found.append(
                f"categories differ only in case: {listed(alike, len(alike))}; filters, facets "
                "and at_most tell them apart until the file spells them alike"
            )
        return found

    def note(self) -> str | None:
        """Return a sentence on events that all lack a time, which no export can mend."""
        if not self.types or self._counts["timeless"] < self.types.total():
            return None
        return (
            f"no event has a time: all {self.types.total():,} get the time of the import, newer "
            "than what is stored, in no order of a user's own; a training learns without an order "
            "if they are half of its log or more, else takes them for older than events with times"
        )

    def _note(self, kind: str, value: Any) -> None:
        self._counts[kind] += 1
        if len(self._examples[kind]) < _EXAMPLES:
            self._examples[kind].append(value)

    def _named(self, kind: str, form: Callable[[Any], str]) -> str:
        """Return the number of a kind, and its first examples."""
        count = self._counts[kind]
        return f"{count:,}: {listed(map(form, self._examples[kind]), count)}"

    async def _joined(self, store: Store, unknown: list[str]) -> list[str]:
        """Return the first of some unknown ids that hold two ids of the catalogue or more."""
        parts = {i: set(_BETWEEN.split(i)) - {""} for i in unknown[:_CHUNK] if not _is_list(i)}
        parts = {item_id: words for item_id, words in parts.items() if len(words) > 1}
        known = await _known(store, set().union(*parts.values()), self._listed)
        return [item_id for item_id, words in parts.items() if len(words & known) > 1]


async def unknown_items(store: Store, item_ids: Iterable[str]) -> list[str]:
    """Return the ids that the catalogue does not have, in their order."""
    unknown: list[str] = []
    ids = iter(item_ids)
    while chunk := list(islice(ids, _CHUNK)):
        items = await store.get_items(chunk)
        unknown += [i for i, item in zip(chunk, items, strict=True) if item is None]
    return unknown


async def titled_items(store: Store, item_ids: Iterable[str]) -> list[str]:
    """Return the ids whose items the catalogue has with a title, in their order."""
    titled: list[str] = []
    ids = iter(item_ids)
    while chunk := list(islice(ids, _CHUNK)):
        titled += [item.item_id for item in await store.get_items(chunk) if item and item.title]
    return titled


async def spelling_warning(
    store: Store, unknown: list[str], imported: Collection[str] = ()
) -> str | None:
    """Return a warning of ids that the catalogue has in another spelling."""
    spelt = {item_id: _spellings(item_id) for item_id in unknown[:_COMPARED]}
    known = await _known(store, set().union(*spelt.values()), imported)
    pairs = {i: next((s for s in others if s in known), None) for i, others in spelt.items()}
    pairs = {item_id: other for item_id, other in pairs.items() if other is not None}
    if not pairs:
        return None
    named = listed((f"{i!r} for {other!r}" for i, other in pairs.items()), len(pairs))
    return (
        "ids that differ from those of the catalogue only in letter case, zeros in front, .0 "
        "behind or characters that are not seen: "
        f"{len(pairs):,}: {named}; they are other items until the file spells them alike"
    )


def _spellings(item_id: str) -> list[str]:
    """Return what programs make of an id: one case, a number without its zeros or as a decimal."""
    found = [item_id.upper(), item_id.lower(), item_id.removesuffix(".0"), f"{item_id}.0"]
    found.append(_UNSEEN.sub("", item_id).strip())
    if item_id.isdecimal():
        bare = item_id.lstrip("0")
        found += [bare.zfill(size) for size in range(max(len(bare), 1), _DIGITS + 1)]
    return [other for other in found if other != item_id]


async def _known(store: Store, item_ids: set[str], imported: Collection[str]) -> set[str]:
    """Return those of some ids that are in the catalogue, or among the imported ones."""
    asked = [item_id for item_id in item_ids if item_id not in imported]
    return item_ids - set(await unknown_items(store, asked))


def _is_list(text: str) -> bool:
    """Report whether an id looks like several: a JSON list, or words between ; | or commas."""
    if not _MARKS.search(text) or _GROUPS.fullmatch(text) or "://" in text:
        return False
    if text[0] + text[-1] in ("[]", "{}"):
        return any(mark in text for mark in ",:\"'")
    words = _WORDS if " " in text else ";|,\n\t"  # a comma and a space are common in titles
    return any(all(part.strip() for part in text.split(mark)) for mark in words if mark in text)


def listed(texts: Iterable[str], count: int) -> str:
    shown = [text for text, _ in zip(texts, range(_EXAMPLES), strict=False)]
    return ", ".join(shown) + (", …" if count > len(shown) else "")


class RejectedRows:
    """Writes rejected rows as they stood, under their file's header, and the reasons beside them.

    The rows go to `path`, in UTF-8 unless a file's encoding was given, and the reasons to the same
    path with `.reasons` behind it, a line for each row. Both are emptied at first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reasons = path.with_name(path.name + ".reasons")
        self.count = 0
        self._rows = path.open("w", encoding="utf-8", errors="surrogateescape", newline="")
        self._reasons: TextIO = self.reasons.open("w", encoding="utf-8", errors="backslashreplace")
        self._header: str | None = None

    def add(self, header: str, row: Row, message: str, *, encoding: str | None = None) -> None:
        """Write a row and its reason; a header that differs from the last one comes before it.

        `encoding` is the one with which the caller reads the file, and will read this one.
        """
        if header != self._header:
            self._rows.reconfigure(encoding=encoding or "utf-8")
            self._rows.write(header)
            self._header = header
        self._rows.write(row_text(row))
        self._reasons.write(message + "\n")
        self.count += 1

    def __enter__(self) -> RejectedRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rows.close()
        self._reasons.close()
