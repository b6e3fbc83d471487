"""The way of every question: open, select, steer, rank, explain, name, fields.

A kind of question is an async function of a `Request`, which calls these steps in that order and
leaves out those that it does not need. Each step is timed as a stage.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.item_filter import EVERYTHING, ItemFilter, comparisons
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint, watched
from models.data.event_log import EventLog
from models.history.user_memory import UserMemory, build_memory
from models.ranking.explanation import Reason
from models.ranking.scoring import Scores
from service.domain.errors import NotFound, StoreUnreachable
from service.domain.records import ATTRIBUTES, Item, check_finite
from service.domain.timestamps import MAX_TIMESTAMP, to_rfc3339
from service.engine.compose import Parts
from service.engine.explanation import Contribution, name_reasons
from service.engine.selection import (
    AppliedRules,
    ItemSelection,
    SteeredItems,
    SteeredQuestion,
    apply_rules,
    pins_of,
    select_items,
    steer_items,
    warn,
)
from service.histories.event_columns import EMPTY, EventColumns
from service.histories.memory_provider import LONG
from service.questions.answers import AnsweredItemOut, AnswerOut, WarningOut
from service.questions.asked import InlineEventIn, PersonalQuestion
from service.questions.parts import ALL_EVENTS, FacetIn, RuleIn, SortIn, VisibleIn
from service.runtime.tracing import StageClock
from service.runtime.work_queue import current_turn

T = TypeVar("T")
Q = TypeVar("Q")

# Targets times rows that are attended on the event loop, in a millisecond or two: less than going
# to a thread and back takes on a busy machine.
_ON_LOOP = 120_000
_MERGED = 200  # of these, that merging one event of a session takes as long as
_STORED = 20  # cost of reading one field of an item, in comparisons
_ABSENT = object()
_ORDER = tuple(AnswerOut.__annotations__)


class Request(Generic[Q]):
    """A question under way: what it is answered from, and the steps of its answer."""

    snapshot: Snapshot
    events: EventColumns = EMPTY  # of the person whose memory is attended
    options: AttentionOptions  # by which it is attended
    visible: VisibleIn = ALL_EVENTS  # of these events
    log: EventLog  # of everybody
    warnings: tuple[WarningOut, ...] = ()  # about what was opened
    degraded = False  # a part that is down was left out

    def __init__(self, parts: Parts, question: Q, stages: StageClock, about: str = "") -> None:
        self.parts = parts
        self.question = question
        self.stages = stages
        self.about = about  # the item or the user that the question is about
        # Without a time in the question, events count that are later by another machine's clock.
        self.at: int | None = getattr(question, "at", None)
        self.now = time.time_ns() // 1_000 if self.at is None else self.at
        self.shown: Sequence[str] = ()  # items before this answer, which count for quotas

    # --------------------------------------------------------------------------- open

    async def open_for(self, question: PersonalQuestion) -> None:
        """Open the memory of the person that a question names, then the snapshot."""
        await self.open(
            question.user_id,
            question.history,
            options=question.options(self.parts.settings),
            visible=question.visible,
        )

    async def open(
        self,
        user_id: str | None = None,
        history: Sequence[InlineEventIn] | None = None,
        *,
        options: AttentionOptions,
        visible: VisibleIn = ALL_EVENTS,
        with_log: bool = False,
    ) -> None:
        """Read the events of a person, then the snapshot, and the log of all events if needed.

        The events come first: their items are in a catalogue that is read after them.
        """
        self.options, self.visible = options, visible
        with self.stages("store"):
            if user_id is not None or history:
                self.events = await self.load(user_id, history or ())
            if with_log:
                await self._open_log()
            else:
                self.snapshot = await self.parts.live.current()
            self.warnings = await self._unknown_types(visible.types or ())

    async def open_snapshot(self) -> None:
        """Read the snapshot, for a question that attends nobody's memory."""
        with self.stages("store"):
            self.snapshot = await self.parts.live.current()

    async def open_log(self) -> None:
        """Read the log of all events, and a snapshot that has its items."""
        with self.stages("store"):
            await self._open_log()

    async def load(
        self, user_id: str | None, history: Sequence[InlineEventIn] = ()
    ) -> EventColumns:
        """Return the events of a person as of the question."""
        merge = partial(self.compute, size=_MERGED * len(history), stage="merge")
        return await self.parts.memories.load(
            user_id, self.at, session=history, now=self.now, compute=merge
        )

    async def _open_log(self) -> None:
        live = self.parts.live
        self.log = await self.parts.event_log.current()
        self.snapshot = await live.current()
        catalogue = self.snapshot.catalogue
        if not catalogue.present.any() and len(catalogue) < len(live.served.vocabulary):
            # Without any catalogue, the items are those of the events.
            try:
                await live.refresh_popularity()
            except StoreUnreachable:
                self.parts.event_log.is_stale = True
            self.snapshot = live.snapshot

    async def _unknown_types(self, names: Collection[str]) -> tuple[WarningOut, ...]:
        """Return a warning of each visible event type that no event of anybody has."""
        log = self.parts.event_log
        unknown = set(names).difference(self.events.type_names)
        if unknown.difference(log.loaded.types.ids):
            try:
                await log.current()
            except StoreUnreachable:  # cannot tell
                return ()
        return _type_warnings(unknown.difference(log.loaded.types.ids), "/visible/types")

    @property
    def until(self) -> int:
        """The time until which logged events count; without `at` all do, as clocks may be ahead."""
        return MAX_TIMESTAMP if self.at is None else self.at

    def item_row(self, item_id: str) -> int:
        """Return the row of an item that can be asked about. Raises `NotFound`."""
        rows = self.snapshot.catalogue.rows([item_id])
        if not self.snapshot.is_known(rows).all():
            raise NotFound(f"no item {item_id!r} in the catalogue")
        return int(rows[0])

    def excluded_rows(self, exclude: Sequence[str], *, seen: bool) -> NDArray[np.int64]:
        """Return the rows of items that are excluded by name, and of those that were seen."""
        catalogue = self.snapshot.catalogue
        excluded = catalogue.rows(sorted(exclude)).astype(np.int64)
        if seen:
            excluded = np.concatenate([excluded, self.events.items])
        return excluded[(excluded >= 0) & (excluded < len(catalogue))]

    def counted_types(
        self, names: frozenset[str] | None
    ) -> tuple[NDArray[np.integer], tuple[WarningOut, ...]]:
        """Return the codes of event types that count, and a warning of each that no event has."""
        known = self.parts.event_log.loaded.types.ids
        warnings = _type_warnings((names or frozenset()).difference(known), "/type")
        return self.parts.event_log.type_codes(names), warnings

    # ------------------------------------------------------------------ select, steer

    async def select(
        self,
        wanted: ItemFilter,
        facets: Sequence[FacetIn] = (),
        sort: Sequence[SortIn] = (),
        pointer: str = "/filter",
    ) -> ItemSelection:
        """Apply a filter."""
        work = partial(select_items, self.snapshot, wanted, facets, sort, pointer)
        return await self.filter(work, 0 if wanted is EVERYTHING else comparisons(wanted))

    async def steer(
        self, question: SteeredQuestion, selection: ItemSelection, *, limit: int | None = None
    ) -> tuple[ItemSelection, SteeredItems]:
        """Apply rules, pins and quotas; their warnings are the selection's too.

        `limit` as for `steer_items`.
        """
        work = partial(
            steer_items,
            question,
            self.snapshot,
            now=self.now,
            allowed=selection.allowed,
            limit=limit,
            shown=self.shown,
        )
        compared = sum(comparisons(rule.when) for rule in question.rules)
        is_steered = question.rules or pins_of(question) or question.at_most
        steered = await self.filter(work, compared + bool(is_steered))
        return selection.with_warnings(steered.warnings), steered

    async def apply_rules(self, rules: Sequence[RuleIn]) -> AppliedRules:
        """Find the items that rules move."""
        compared = sum(comparisons(rule.when) for rule in rules)
        return await self.filter(partial(apply_rules, self.snapshot, rules, self.now), compared)

    async def filter(self, work: Callable[[], T], compared: float) -> T:
        """Do work that makes `compared` comparisons with each item; 0 = at once and untimed."""
        if not compared:
            return work()
        return await self.compute(work, compared * len(self.snapshot.catalogue), stage="filter")

    # ------------------------------------------------------------------ rank, explain

    def size(self, targets: int, explain: int) -> float:
        """Return the targets times the rows; inf where that does not say how long they take."""
        events = len(self.events)
        # Other requests may hold the lock of a long history, which is collapsed.
        return targets * max(1, events) if not explain and events < LONG else math.inf

    async def attend(self, work: Callable[[UserMemory], T], size: float = math.inf) -> T:
        """Do work with the person's memory; `size` as for `compute`."""

        def attend() -> T:
            with self.parts.memories.memory(
                self.snapshot, self.events, self.options, now=self.now, visible=self.visible
            ) as user:
                return work(user)

        return await self.compute(attend, size)

    def every_row(self) -> UserMemory:
        """Return the person's memory with a row for each event, also of a long history."""
        history = self.parts.memories.history(self.snapshot, self.events, self.visible)
        return build_memory(self.snapshot, history, self.now)

    async def compute(
        self, work: Callable[[], T], size: float = math.inf, *, stage: str = "attend"
    ) -> T:
        """Do work on a thread, or on the event loop where it takes less than going there and back.

        size: targets times rows, or items times conditions; inf = not known.
        """
        turn = current_turn.get()
        with self.stages(stage):
            on_loop, executor = size <= _ON_LOOP, self.parts.executor
            if turn is None:  # outside of HTTP, or of a request that waits in no queue
                run = asyncio.get_running_loop().run_in_executor
                return work() if on_loop else await run(executor, work)
            if turn.is_long or not on_loop:
                return await turn.run(executor, partial(watched, turn.look, work))
            with turn.computing():
                return work()

    # ------------------------------------------------------------------- name, fields

    async def name(self, reasons: Sequence[Sequence[Reason]]) -> list[tuple[Contribution, ...]]:
        """Name the events behind the reasons of each of some items."""
        if not reasons:
            return []
        with self.stages("explain"):
            named = await name_reasons(self.parts.store, self.snapshot, self.events, reasons)
        self.degraded = self.degraded or named.is_degraded
        return named.of_items

    async def add_fields(self, items: Sequence[Any], names: Sequence[str]) -> None:
        """Add those of the fields that an item has to each item of an answer."""
        if names:
            add = partial(_add_fields, items, names)
            await self.with_stored(items, add, len(names), stage="store")

    async def with_stored(
        self,
        items: Sequence[AnsweredItemOut],
        add: Callable[[Sequence[Item | None]], None],
        size: float,
        *,
        stage: str,
    ) -> None:
        """Add stored data of items to them; `size` is the work for each item.

        If the store cannot be reached, the items stay without them, and the answer is degraded.
        """
        with self.stages("store"):
            try:
                stored = await self.parts.store.get_items([item["item_id"] for item in items])
            except StoreUnreachable:
                self.degraded = True
                return
        await self.compute(partial(add, stored), _STORED * size * len(stored), stage=stage)

    def is_degraded(self, *, with_log: bool = False) -> bool:
        """Report whether a part that is down was left out of the answer."""
        return (
            self.degraded
            or self.events.is_stale
            or self.parts.live.degraded
            or (with_log and self.parts.event_log.is_stale)
        )

    def finish(self, answer: AnswerOut, *, with_log: bool = False) -> AnswerOut:
        """Return an answer with its members in the order in which they are documented."""
        answer["degraded"] = self.is_degraded(with_log=with_log)
        if self.warnings:
            warn(answer, self.warnings)
        named: dict[str, Any] = {name: answer.get(name, _ABSENT) for name in _ORDER}
        return cast("AnswerOut", {k: v for k, v in named.items() if v is not _ABSENT})


def _type_warnings(unknown: Collection[str], pointer: str) -> tuple[WarningOut, ...]:
    return tuple(
        WarningOut(pointer=pointer, detail=f"no event has the type {name!r}")
        for name in sorted(unknown)
    )


def answer_of(snapshot: Snapshot, items: list[AnsweredItemOut], **members: Any) -> AnswerOut:
    """Return an answer with these items. Raises `ArithmeticError` for a score of NaN."""
    check_finite("scores", [item["score"] for item in items if "score" in item])
    version = {"model_version": snapshot.version, "retrieval": "exact", "degraded": False}
    return cast("AnswerOut", {"items": items, **version, **members})


def attended(scored: Sequence[Scores]) -> dict[str, Any]:
    """Return how the memories behind some scores were attended, as members of an answer."""
    scored = [scores for scores in scored if scores.memory_rows]
    if not scored:
        return {"retrieval": "exact"}
    return {
        "retrieval": next((scores.mode for scores in scored if scores.mode != "exact"), "exact"),
        "rows_scanned": round(sum(scores.rows_scanned for scores in scored) / len(scored)),
        "memory_rows": round(sum(scores.memory_rows for scores in scored) / len(scored)),
    }


def _add_fields(
    items: Sequence[AnsweredItemOut], names: Sequence[str], stored: Sequence[Item | None]
) -> None:
    for item, record in zip(items, stored, strict=True):
        checkpoint()
        values = {} if record is None else {name: _field(record, name) for name in names}
        item["fields"] = {name: value for name, value in values.items() if value is not _ABSENT}


def _field(item: Item, name: str) -> Any:
    if name.startswith(ATTRIBUTES):
        return _member(item.attributes, name.removeprefix(ATTRIBUTES))
    if name == "published_at":
        return _ABSENT if item.published_at is None else to_rfc3339(item.published_at)
    return getattr(item, name)


def _member(members: Mapping[str, Any], path: str) -> Any:
    """Return the member at a path; a name that holds dots itself goes before nested ones."""
    if path in members:
        return members[path]
    for at, letter in enumerate(path):
        inner = members.get(path[:at]) if letter == "." else None
        if isinstance(inner, Mapping):
            value = _member(inner, path[at + 1 :])
            if value is not _ABSENT:
                return value
    return _ABSENT
