"""Rows of a home page: items due to one item of the history, trending, new, taken again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.history.user_memory import UserMemory
from models.ranking.audiences import because_rows, distinctive_categories
from models.ranking.explanation import Reason, explain
from models.ranking.lineup import take_first
from models.ranking.recommend import Ranked, best_scores, recommend
from models.ranking.steering import ItemSteering, QuotaCounts
from service.domain.records import NEGATIVE, check_finite
from service.engine.explanation import (
    Contribution,
    merge_events,
    name_events,
    remainder_of,
    write_explanation,
)
from service.engine.pipeline import Request, attended
from service.engine.popular import popular_items
from service.engine.recommend import scored_items
from service.engine.selection import Counted, ItemSelection, SteeredItems, count_items
from service.histories.event_columns import EventColumns
from service.questions.answers import (
    AnsweredItemOut,
    AttendedEventOut,
    RowOut,
    RowReasonOut,
    RowsOut,
)
from service.questions.asked import attention_options
from service.questions.ready import PopularIn, RowsIn

_POOLED = 2  # items that are ranked for a page, for each that it shows
MOST_POOLED = 150
FEWEST = 3  # items of a row, unless the question asks for fewer
_CATEGORIES = 2  # of the user's, whose new items are shown
_NEWEST_EVENTS = 200  # whose items say which categories these are
_NAMED_EVENTS = 3  # of the reason of a row

# By the type of the event.
_BECAUSE = {
    "view": "Because you viewed",
    "click": "Because you viewed",
    "watch": "Because you watched",
    "play": "Because you played",
    "listen": "Because you listened to",
    "read": "Because you read",
    "like": "Because you liked",
    "purchase": "Because you bought",
    "buy": "Because you bought",
    "rating": "Because you rated",
    "profile": "Because you are interested in",
}
REASONS = 5  # of each recommended item
MOST_OF_LONG = 80  # new items of a long history, which is explained item by item, in some ms each


async def answer_rows(request: Request[RowsIn]) -> RowsOut:
    """Make the rows of a home page."""
    question = request.question
    await request.open(
        question.user_id,
        question.history,
        options=attention_options(question.retrieval, request.parts.settings),
        visible=question.visible,
        with_log=True,
    )
    snapshot, events = request.snapshot, request.events
    selection = await request.select(question.filter, question.facets)
    selection, steered = await request.steer(question, selection)
    excluded = request.excluded_rows(question.exclude, seen=False)
    if (buried := steered.steering.buried) is not None:
        selection = replace(selection, allowed=selection.allowed & ~buried)

    page = HomePage(request, selection, steered, excluded)

    def count() -> Counted | None:
        mask = selection.allowed.copy()
        mask[events.items[events.items < len(mask)]] = False
        again = repeated_items(events, len(mask))
        mask[again] = selection.allowed[again]
        mask[excluded] = False
        return count_items(snapshot, mask, question.facets)

    counted = await request.compute(count, stage="filter") if question.facets else None
    pool = await request.attend(page.pool)
    with request.stages("explain"):
        named = await name_events(request.parts.store, snapshot, events, pool.reasons)
    request.degraded = named.is_degraded
    rows = await request.compute(lambda: page.rows(pool, named.of_items), stage="count")
    await request.add_fields([item for row in rows for item in row["items"]], question.fields)
    answer: RowsOut = {
        "rows": rows,
        "model_version": snapshot.version,
        "degraded": request.is_degraded(with_log=True),
    }  # type: ignore[typeddict-item]  # `attended` has the retrieval
    if warnings := [*selection.warnings, *request.warnings]:
        answer["warnings"] = warnings
    if counted is not None and counted.total is not None:
        answer |= {"total": counted.total, "facets": counted.facets}
    answer |= attended([pool.fresh.scores])  # type: ignore[typeddict-item]
    return answer


@dataclass(frozen=True, slots=True, eq=False)
class PersonalPool:
    """Ranked items of a requester: new ones with their reasons, and those that come back."""

    fresh: Ranked  # items that the requester has not had, best first
    reasons: Sequence[Sequence[Reason]]  # of each of these
    again: Ranked  # items that the requester took at several times


class HomePage:
    """Rows under construction: no item comes twice.

    Args:
        request: opened with the log of all events.
        selection: of the items that may be answered, without buried ones.
        steered: boosts as the question has them, and the quotas of each row.
        excluded: item rows that may not be in any row.
    """

    def __init__(
        self,
        request: Request[RowsIn],
        selection: ItemSelection,
        steered: SteeredItems,
        excluded: NDArray[np.int64],
    ) -> None:
        self.request, self.question = request, request.question
        self.snapshot, self.events = request.snapshot, request.events
        self.selection, self.steered, self.excluded = selection, steered, excluded
        self.used: set[str] = set()

    def pool(self, user: UserMemory) -> PersonalPool:
        """Rank new items, fewer of a long history, and items that come back."""
        question, allowed = self.question, self.selection.allowed
        snapshot, options = self.snapshot, self.request.options
        steering = self.steered.steering
        if steering.boost is not None:
            scaled = steering.scaled(best_scores(snapshot, user, allowed, options))
            steering = ItemSteering(boost=scaled.boost)
        size = min(MOST_POOLED, _POOLED * question.rows * question.limit)
        ranked = partial(recommend, snapshot, user, options=options, steering=steering)
        fresh = ranked(
            limit=size if user.collapsed is None else min(size, MOST_OF_LONG),
            allowed=allowed,
            excluded=np.concatenate([self.excluded, self._seen()]),
        )
        part = fresh.scores.partial
        reasons = explain(snapshot, user, fresh.rows, REASONS, options, partial=part)
        repeated = np.zeros_like(allowed)
        repeated[repeated_items(self.events, len(allowed))] = True
        again = ranked(limit=question.limit, allowed=allowed & repeated, excluded=self.excluded)
        return PersonalPool(fresh, reasons, again)

    def rows(
        self, pool: PersonalPool, explanations: Sequence[tuple[Contribution, ...]]
    ) -> list[RowOut]:
        """Return the rows of a requester, those of strangers where nothing is known of them.

        `explanations` are the named reasons of each new item of the pool.
        """
        count = self.question.rows
        if not pool.fresh.personal:
            made = [*self._ranked("popular"), *self._ranked("trending"), *self._ranked("newest")]
            return made[:count]
        causes = self._because(pool, explanations)
        planned = (count + 1) // 2
        first = [row for row in causes[:planned] if self._take(row)]
        others = self._others(pool, count - len(first))
        for cause in causes[planned:]:
            row = self._without_used(cause)
            if len(first) + len(others) < count and self._take(row):
                first.append(row)
        made = _alternating(first, others)
        if len(made) < count:
            reason = RowReasonOut(kind="recommended", text="Recommended for you")
            made += self._rest(pool.fresh, reason)
        if len(made) < count:
            made += self._ranked("popular")
        return made

    # ------------------------------------------------------------------ kinds of rows

    def _others(self, pool: PersonalPool, count: int) -> list[RowOut]:
        made: list[RowOut] = []
        if len(made) < count:
            made += self._ranked("trending")
        if len(made) < count and (categories := self._categories()):
            made += self._ranked("newest", categories)
        if len(made) < count:
            made += self._rest(pool.again, RowReasonOut(kind="again", text="Take it again"))
        return made

    def _because(
        self, pool: PersonalPool, explanations: Sequence[tuple[Contribution, ...]]
    ) -> list[RowOut]:
        """Return rows of items that one item of the history, or one interest, raises most."""
        catalogue = self.snapshot.catalogue
        servable = catalogue.servable
        items = self._items(pool.fresh)
        scores = pool.fresh.scores
        personal = scores.personal.tolist()
        causes: dict[str, int] = {}
        entries: list[tuple[int, int, float]] = []
        raising = [
            [e for e in named if e.contribution > 0 and e.row["type"] not in NEGATIVE]
            for named in explanations
        ]
        for target, named in enumerate(raising):
            for reason in named:
                name = _name(reason)
                row = catalogue.row(name)
                if row < 0 or servable[row]:  # one that is only known from events has no title
                    cause = causes.setdefault(name, len(causes))
                    entries.append((target, cause, reason.contribution))
        gains = np.zeros((len(items), len(causes)))
        for target, cause, gain in entries:
            gains[target, cause] += gain
        names = list(causes)
        rows: list[RowOut] = []
        for chosen in because_rows(
            gains,
            count=self.question.rows,
            limit=self.question.limit,
            least=self._fewest,
            choose=self._choice(pool.fresh.rows),
        ):
            of_row: list[AnsweredItemOut] = []
            events: list[Contribution] = []
            for target in chosen.targets.tolist():
                of_cause = [e for e in raising[target] if _name(e) == names[chosen.cause]]
                item = items[target].copy()
                merged = merge_events(of_cause)
                item["explanation"] = write_explanation(merged)
                item["remainder"] = remainder_of(merged, personal[target], scores.memory_rows)
                of_row.append(item)
                events += of_cause
            rows.append({"reason": _because_reason(events), "items": of_row})
        return rows

    def _ranked(
        self, kind: Literal["popular", "trending", "newest"], categories: Sequence[str] = ()
    ) -> list[RowOut]:
        """Return a row of what everybody takes, or of what is new; none of too few items."""
        selection = self.selection
        if categories:
            allowed = selection.allowed & self.snapshot.catalogue.in_categories(categories)
            selection = ItemSelection(allowed)
        question = PopularIn.model_construct(
            by=kind, limit=self.question.limit, at=self.question.at
        )
        used = self.snapshot.catalogue.rows(sorted(self.used))
        answer = popular_items(
            question,
            self.snapshot,
            self.request.log,
            self.request.parts.event_log.type_codes(None),
            selection=selection,
            steered=self.steered,
            excluded=np.concatenate([self.excluded, self._seen(), used]).astype(np.int64),
            at=self.request.now,
        )
        text = {
            "popular": "Popular with everybody",
            "trending": "Trending now",
            "newest": f"New in {' and '.join(categories)}" if categories else "New",
        }[kind]
        reason: RowReasonOut = {"kind": kind, "text": text}
        if categories:
            reason["categories"] = [*categories]
        row: RowOut = {"reason": reason, "items": answer["items"]}
        return [row] if self._take(row) else []

    def _categories(self) -> list[str]:
        """Return the categories of what the requester took last, beside their usual shares."""
        places = liked_events(self.events, len(self.snapshot.catalogue))[-_NEWEST_EVENTS:]
        rows = self.events.rows[places].tolist()
        return distinctive_categories(self.snapshot.catalogue, rows, _CATEGORIES)

    def _rest(self, ranked: Ranked, reason: RowReasonOut) -> list[RowOut]:
        """Return a row of the best items that are in no other row; none of too few items."""
        items, rows = self._items(ranked), ranked.rows
        unused = np.flatnonzero([item["item_id"] not in self.used for item in items])
        chosen = self._choice(rows)(unused).tolist()
        row: RowOut = {"reason": reason, "items": [items[place] for place in chosen]}
        return [row] if self._take(row) else []

    # ------------------------------------------------------------------ the parts

    @property
    def _fewest(self) -> int:
        return min(FEWEST, self.question.limit)

    def _items(self, ranked: Ranked) -> Sequence[AnsweredItemOut]:
        items = scored_items(self.snapshot, ranked.rows, ranked.scores)
        check_finite("scores", [item["score"] for item in items])
        self.steered.applied.describe(items, ranked.rows)
        return items

    def _choice(
        self, rows: NDArray[np.integer]
    ) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the choice of the items of a row from a pool, item rows [T]."""
        fields, quotas = self.snapshot.catalogue.fields, self.steered.steering.quotas
        counts = QuotaCounts.over(fields, quotas, rows.astype(np.int64))
        return lambda order: take_first(order, counts.copy(), self.question.limit)

    def _seen(self) -> NDArray[np.int64]:
        """Return the rows of the requester's items in the catalogue."""
        seen = self.events.items
        return seen[seen < len(self.selection.allowed)]

    def _without_used(self, row: RowOut) -> RowOut:
        unused = [item for item in row["items"] if item["item_id"] not in self.used]
        return {"reason": row["reason"], "items": unused}

    def _take(self, row: RowOut) -> bool:
        """Put a row on the page, unless it has too few items."""
        if len(row["items"]) < self._fewest:
            return False
        self.used.update(item["item_id"] for item in row["items"])
        return True


def _name(reason: Contribution) -> str:
    """Return the item of an event, or the interest of a profile."""
    return reason.row["item_id"] or reason.row["title"]


def _because_reason(contributions: Sequence[Contribution]) -> RowReasonOut:
    """Return the reason of a row: its item, and the events that add most to the row's scores."""
    sums: dict[tuple[object, ...], float] = {}
    rows: dict[tuple[object, ...], AttendedEventOut] = {}
    for part in contributions:
        key = tuple(part.row.values())
        rows[key] = part.row
        sums[key] = sums.get(key, 0.0) + part.contribution
    best = [rows[key] for key in sorted(sums, key=lambda key: -sums[key])]
    first = best[0]
    begin = _BECAUSE.get(first["type"], "Because of")
    events = [row["event_id"] for row in best[:_NAMED_EVENTS] if row["event_id"] is not None]
    text = f"{begin} {first['title'] or first['item_id']}"
    reason: RowReasonOut = {"kind": "because", "text": text}
    if first["item_id"] is not None:
        reason["item_id"] = first["item_id"]
    if events:
        reason["event_ids"] = events
    return reason


def _alternating(first: Sequence[RowOut], second: Sequence[RowOut]) -> list[RowOut]:
    pairs = zip_longest(first, second)
    return [row for pair in pairs for row in pair if row is not None]


def liked_events(events: EventColumns, size: int) -> NDArray[np.int64]:
    """Return the places of events on the first `size` items that are not negative."""
    negative = np.array([name in NEGATIVE for name in events.type_names] or [False], np.bool_)
    is_liked = ~negative[events.types] & (events.rows >= 0) & (events.rows < size)
    return np.flatnonzero(is_liked)


def repeated_items(events: EventColumns, size: int) -> NDArray[np.int64]:
    """Return the rows of the items that were taken at two times or more."""
    places = liked_events(events, size)
    order = np.lexsort((events.timestamps[places], events.rows[places]))
    rows, times = events.rows[places][order], events.timestamps[places][order]
    another = (rows[1:] == rows[:-1]) & (times[1:] != times[:-1])
    return np.unique(rows[1:][another]).astype(np.int64)
