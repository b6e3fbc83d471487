"""The rows of a home page: due to what one took, trending, new, taken again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog
from models.ranking.audiences import because_rows, distinctive_categories
from models.ranking.lineup import QuotaChoice
from models.ranking.recommend import Ranked
from service.domain.queries import AnswerItem, Contribution, MemoryRow
from service.domain.ready_queries import (
    AnswerRow,
    PopularityKind,
    PopularQuery,
    RowReason,
    RowsQuery,
)
from service.domain.records import NEGATIVE
from service.engine.explanation.naming import merge_events, remainder_of
from service.engine.questions.personal_pool import PersonalPool, liked_events
from service.engine.questions.popular import popular_items
from service.engine.questions.score import score_answer
from service.engine.selection.item_selection import ItemSelection
from service.engine.selection.steering import SteeredItems
from service.histories.event_columns import EventColumns

FEWEST = 3  # items of a row, where it may have so many
_CATEGORIES = 2  # of the user's, of which new items are shown
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


@dataclass(slots=True)
class HomePage:
    """Rows under construction: no item comes twice.

    Args:
        query: the request.
        snapshot: the model and the catalogue.
        log: all events.
        types: codes of the event types that count.
        events: the requester's.
        selection: of the items that may be answered, without buried ones.
        steered: boosts as the question has them, and the quotas of each row.
        excluded: item rows that may not be in any row.
        at: the time of the request, microseconds UTC.
    """

    query: RowsQuery
    snapshot: Snapshot
    log: EventLog
    types: NDArray[np.integer]
    events: EventColumns
    selection: ItemSelection
    steered: SteeredItems
    excluded: NDArray[np.int64]
    at: int
    used: set[str] = field(default_factory=set)

    def rows(
        self, pool: PersonalPool, explanations: Sequence[tuple[Contribution, ...]]
    ) -> list[AnswerRow]:
        """Return the rows of a requester, those of strangers where nothing is known of them.

        Args:
            pool: what is recommended to the requester; of strangers it is not personal.
            explanations: of each new item of the pool, its named reasons.
        """
        count = self.query.rows
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
            reason = RowReason("recommended", "Recommended for you")
            made += self._rest(pool.fresh, reason)
        if len(made) < count:
            made += self._ranked("popular")
        return made

    # ------------------------------------------------------------------ kinds of rows

    def _others(self, pool: PersonalPool, count: int) -> list[AnswerRow]:
        """Return rows that are not due to one item."""
        made: list[AnswerRow] = []
        if len(made) < count:
            made += self._ranked("trending")
        if len(made) < count and (categories := self._categories()):
            made += self._ranked("newest", categories)
        if len(made) < count:
            made += self._rest(pool.again, RowReason("again", "Take it again"))
        return made

    def _because(
        self, pool: PersonalPool, explanations: Sequence[tuple[Contribution, ...]]
    ) -> list[AnswerRow]:
        """Return rows of items that one item of the history, or one interest, raises most."""
        catalogue = self.snapshot.catalogue
        servable = catalogue.servable
        items = self._items(pool.fresh)
        scores = pool.fresh.scores
        personal = scores.personal.tolist()
        causes: dict[str, int] = {}
        entries: list[tuple[int, int, float]] = []
        raising = [
            [e for e in named if e.contribution > 0 and e.row.type not in NEGATIVE]
            for named in explanations
        ]
        for target, named in enumerate(raising):
            for each in named:
                name = _name(each)
                row = catalogue.row(name)
                if row < 0 or servable[row]:  # one that is only known from events has no title
                    cause = causes.setdefault(name, len(causes))
                    entries.append((target, cause, each.contribution))
        gains = np.zeros((len(items), len(causes)))
        for target, cause, gain in entries:
            gains[target, cause] += gain
        names = list(causes)
        rows: list[AnswerRow] = []
        for chosen in because_rows(
            gains,
            count=self.query.rows,
            limit=self.query.limit,
            least=self._fewest,
            choose=self._choice(pool.fresh.rows),
        ):
            own: list[AnswerItem] = []
            events: list[Contribution] = []
            for target in chosen.targets.tolist():
                of_cause = [e for e in raising[target] if _name(e) == names[chosen.cause]]
                item = items[target].copy()
                item["explanation"] = merge_events(of_cause)
                item["remainder"] = remainder_of(
                    item["explanation"], personal[target], scores.memory_rows
                )
                own.append(item)
                events += of_cause
            rows.append(AnswerRow(_because_reason(events), own))
        return rows

    def _ranked(
        self, kind: Literal["popular", "trending", "newest"], categories: Sequence[str] = ()
    ) -> list[AnswerRow]:
        """Return a row of what everybody takes, or of what is new; none of too few items."""
        selection = self.selection
        if categories:
            allowed = selection.allowed & self.snapshot.catalogue.in_categories(categories)
            selection = ItemSelection(allowed)
        by: PopularityKind = kind
        query = PopularQuery(self.query.requester, by, limit=self.query.limit)
        seen = self.events.items
        used = self.snapshot.catalogue.rows(sorted(self.used))
        rows = np.concatenate([self.excluded, seen[seen < len(selection.allowed)], used])
        answer = popular_items(
            query,
            self.snapshot,
            self.log,
            self.types,
            selection,
            self.steered,
            rows.astype(np.int64),
            self.at,
        )
        text = {
            "popular": "Popular with everybody",
            "trending": "Trending now",
            "newest": f"New in {_listed(categories)}" if categories else "New",
        }[kind]
        row = AnswerRow(RowReason(kind, text, categories=tuple(categories)), answer.items)
        return [row] if self._take(row) else []

    def _categories(self) -> list[str]:
        """Return the categories of what the requester took last, beside their usual shares."""
        places = liked_events(self.events, len(self.snapshot.catalogue))[-_NEWEST_EVENTS:]
        rows = self.events.rows[places].tolist()
        return distinctive_categories(self.snapshot.catalogue, rows, _CATEGORIES)

    def _rest(self, ranked: Ranked, reason: RowReason) -> list[AnswerRow]:
        """Return a row of the best items that are in no other row; none of too few items."""
        items, rows = self._items(ranked), ranked.rows
        left = np.flatnonzero([item["item_id"] not in self.used for item in items])
        row = AnswerRow(reason, [items[place] for place in self._choice(rows)(left).tolist()])
        return [row] if self._take(row) else []

    # ------------------------------------------------------------------ the parts

    @property
    def _fewest(self) -> int:
        return min(FEWEST, self.query.limit)

    def _items(self, ranked: Ranked) -> Sequence[AnswerItem]:
        requester, snapshot = self.query.requester, self.snapshot
        items = score_answer(requester, snapshot, ranked.rows, ranked.scores, ()).items
        self.steered.applied.describe(items, ranked.rows)
        return items

    def _choice(self, rows: NDArray[np.integer]) -> QuotaChoice:
        """Return the choice of the items of a row from a pool, item rows [T]."""
        fields, quotas = self.snapshot.catalogue.fields, self.steered.steering.quotas
        return QuotaChoice(fields, quotas, rows.astype(np.int64), self.query.limit)

    def _without_used(self, row: AnswerRow) -> AnswerRow:
        return AnswerRow(
            row.reason, [item for item in row.items if item["item_id"] not in self.used]
        )

    def _take(self, row: AnswerRow) -> bool:
        """Put a row on the page, unless it has too few items."""
        if len(row.items) < self._fewest:
            return False
        self.used.update(item["item_id"] for item in row.items)
        return True


def _name(each: Contribution) -> str:
    """Return the item of an event, or the interest of a profile."""
    return each.row.item_id or each.row.title


def _because_reason(contributions: Sequence[Contribution]) -> RowReason:
    """Return the reason of a row: its item, and the events that add most to the row's scores."""
    sums: dict[MemoryRow, float] = {}
    for each in contributions:
        sums[each.row] = sums.get(each.row, 0.0) + each.contribution
    best = sorted(sums, key=lambda row: -sums[row])
    first = best[0]
    begin = _BECAUSE.get(first.type, "Because of")
    events = [row.event_id for row in best[:_NAMED_EVENTS] if row.event_id is not None]
    text = f"{begin} {first.title or first.item_id}"
    return RowReason("because", text, first.item_id, tuple(events))


def _alternating(first: Sequence[AnswerRow], second: Sequence[AnswerRow]) -> list[AnswerRow]:
    made: list[AnswerRow] = []
    for place in range(max(len(first), len(second))):
        made += [*first[place : place + 1], *second[place : place + 1]]
    return made


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)
