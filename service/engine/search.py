"""Search of the catalogue or a history by words and meaning, and lists in the order of fields."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.catalogue import Catalogue
from models.catalogue.item_filter import EVERYTHING
from models.catalogue.item_values import EMBEDDING
from models.catalogue.snapshot import Snapshot
from models.catalogue.sorting import SortedValue, SortKey, SortPosition, position, sorted_rows
from models.history.user_memory import UserMemory
from models.ranking.explanation import Reason
from models.ranking.lineup import SteeredRows, take_first
from models.ranking.matches import (
    DEFAULTS,
    FieldMatches,
    SearchParameters,
    SearchResults,
    allowed_keywords,
    match_fields,
    meaning_floor,
)
from models.ranking.scoring import Scores, score
from models.ranking.search import (
    EventResults,
    nearest,
    personal_bias,
    search,
    search_events,
    strong_matches,
    take,
)
from models.ranking.steering import NO_STEERING, ItemSteering, Quota, QuotaCounts
from models.text.bm25 import Hits
from models.text.query_parser import ParsedQuery
from models.text.terms import MAX_COMPLETED, NO_KEYWORDS
from service.domain.errors import Invalid
from service.domain.records import Item
from service.domain.timestamps import to_rfc3339
from service.engine.explanation import (
    Contribution,
    explain_items,
    name_rows,
    remainder_of,
    write_explanation,
)
from service.engine.highlight import add_highlights
from service.engine.pipeline import Request, answer_of
from service.engine.selection import (
    UNSTEERED,
    Counted,
    SteeredItems,
    count_items,
    steer_items,
    warn,
)
from service.histories.event_columns import EMPTY, EventColumns, visible_events
from service.questions.answers import (
    AnsweredItemOut,
    AnswerOut,
    FoundEventOut,
    FoundEventsOut,
    WarningOut,
)
from service.questions.asked import MAX_RANKED, SearchIn
from service.questions.parts import SortIn
from service.snapshots.live_search import SearchSetup

RERANKED = 200  # items matched by text that a user's memory re-ranks
BM25_HITS = 500  # items at most that BM25 contributes
MAX_MATCHES = 100_000  # items with words of a query, the best ones, that are counted or sorted
KNOWN_WORDS = 0.1  # coverage of a query from which on its words are evidence enough
_MEANT = 3  # words of a query from which on it may be meant rather than named
_SHOWN = 60  # characters of a query in a warning

_FIELD_KEY = 10  # targets times rows that are attended while one field key is compared
_SHORT = 200  # characters of a query whose words are looked up on the event loop
NEWEST_FIRST = (SortIn(field="published_at", order="desc"),)  # without a `sort`

# BM25 and the nearest keys of many items take milliseconds each, and both release the GIL.
_BM25 = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="heed-bm25")


async def answer_search(request: Request[SearchIn]) -> AnswerOut | FoundEventsOut:
    """Search items by text and re-rank them by a person's memory, or list them, or search events.

    Explanations are of the memory's score. Raises `Invalid` for a cursor of another list.
    """
    question = request.question
    if question.memory == "history":
        return await _search_history(request)
    if question.is_listing:
        return await _list(request)
    offset = question.offset
    if question.cursor is not None:
        offset = _page_offset(question.cursor, MAX_RANKED - question.limit)
    await request.open_for(question)
    snapshot, setup = request.snapshot, request.parts.search.setup
    selection = await request.select(question.filter, question.facets)
    selection, steered = await request.steer(question, selection, limit=question.limit + offset)

    def attend(user: UserMemory) -> SearchOutcome:
        return search_items(
            question,
            snapshot,
            user,
            setup,
            allowed=selection.allowed,
            options=request.options,
            steering=steered.steering,
            events=request.events,
            offset=offset,
        )

    size = _cost(request) + request.size(RERANKED, question.explain)
    outcome = await request.attend(attend, size)
    named = await request.name(outcome.reasons)
    answer = search_answer(question, snapshot, outcome, named, steered)
    selection.describe(answer, outcome.counted)
    await _add_texts(request, answer["items"], outcome.parsed)
    return request.finish(answer)


def _cost(request: Request[SearchIn]) -> float:
    """Return how long matching a query takes, as for `Request.compute`; inf if encoding is slow."""
    if request.parts.search.setup.quick and len(request.question.query) <= _SHORT:
        return _FIELD_KEY * len(request.snapshot.catalogue.keys)
    return math.inf


async def _list(request: Request[SearchIn]) -> AnswerOut:
    """List items in the order of their fields, the same list for every user.

    Raises `Invalid` for a cursor of another order.
    """
    question, setup = request.question, request.parts.search.setup
    await request.open_snapshot()
    snapshot = request.snapshot
    selection = await request.select(question.filter, question.facets, question.sort)

    def find() -> AnswerOut:
        mask, parsed, matches = selection.allowed, None, None
        warnings: tuple[WarningOut, ...] = ()
        if question.query.strip():
            parsed, matches = match_text(
                question.query,
                snapshot,
                setup.encode,
                allowed=mask,
                options=question.options(request.parts.settings),
                parameters=setup.parameters,
            )
            mask, warnings = matched_items(snapshot, parsed, matches, mask)
        steered = steer_items(question, snapshot, allowed=selection.allowed, shown=request.shown)
        answer = list_items(question, snapshot, mask, steered.steering.quotas)
        if matches is not None:
            answer |= {"retrieval": matches.mode, "keys_attended": matches.attended}
        warned = selection.with_warnings(steered.warnings + warnings)
        warned.describe(answer, count_items(snapshot, mask, question.facets))
        if warnings:
            del answer["total"]  # not all were counted
        describe_query(answer, question, snapshot.catalogue, parsed, found=bool(mask.any()))
        return answer

    answer = await request.compute(find)
    await _add_texts(request, answer["items"])
    return request.finish(answer)


async def _search_history(request: Request[SearchIn]) -> FoundEventsOut:
    """Search the events of a person by the texts of their items."""
    question, setup = request.question, request.parts.search.setup
    await request.open_for(question)
    snapshot, events = request.snapshot, request.events
    selection = await request.select(question.filter)

    def find() -> tuple[EventResults, list[int], ParsedQuery | None]:
        # Items that the catalogue does not know yet, at -1 or behind its end, are not allowed.
        allowed = np.append(selection.allowed, False)
        may = allowed[np.where(events.rows < len(selection.allowed), events.rows, -1)]
        visible = visible_events(snapshot, events, question.visible)
        places = np.flatnonzero(may if visible is None else may & visible)
        rows = events.rows[places].astype(np.int64)
        of_events = np.zeros_like(selection.allowed)
        of_events[rows] = True
        parsed, matches = match_text(
            question.query,
            snapshot,
            setup.encode,
            allowed=of_events,
            options=request.options,
            parameters=setup.parameters,
            depth=question.limit,
        )
        found = search_events(
            matches,
            rows,
            request.now - events.timestamps[places],
            limit=question.limit,
            fill=question.fill,
            min_score=question.min_score,
        )
        return found, places[found.events].tolist(), parsed

    found, sources, parsed = await request.compute(find, _cost(request) + len(events))
    with request.stages("explain"):
        named = await name_rows(request.parts.store, snapshot, events, sources)
    request.degraded = named.is_degraded
    rows = found.items.rows[found.places]
    columns = zip(
        named.ids,
        snapshot.catalogue.vocabulary.ids_of(rows.tolist()),
        snapshot.catalogue.titles.take(rows),
        events.types[sources].tolist(),
        events.timestamps[sources].tolist(),
        found.match.tolist(),
        found.recency.tolist(),
        found.weights.tolist(),
        found.places.tolist(),
        strict=True,
    )
    entries: list[FoundEventOut] = [
        {
            "event_id": event_id or None,
            "item_id": item_id,
            "title": title,
            "type": events.type_names[code],
            "timestamp": to_rfc3339(timestamp),
            "score": match + recency,
            "parts": {"match": match, "recency": recency},
            "weight": weight,
            "matched": found.items.matched[place],
        }
        for event_id, item_id, title, code, timestamp, match, recency, weight, place in columns
    ]
    answer = answer_of(
        snapshot,
        cast("list[AnsweredItemOut]", entries),
        retrieval=found.items.mode,
        keys_attended=found.items.keys,
        mass=found.items.mass,
    )
    describe_query(answer, question, snapshot.catalogue, parsed, found=bool(entries))
    selection.describe(answer)
    await _add_texts(request, answer["items"], parsed)
    out = request.finish(answer)
    del out["items"]  # type: ignore[misc]
    return cast("FoundEventsOut", {"events": entries, **out})


async def _add_texts(
    request: Request[SearchIn],
    items: Sequence[AnsweredItemOut],
    parsed: ParsedQuery | None = None,
) -> None:
    """Add highlights and fields to items, if the question asks for them."""
    question, index = request.question, request.snapshot.catalogue.bm25_index
    if question.highlight and index is not None and items:

        def add(stored: Sequence[Item | None]) -> None:
            query = parsed or index.parser.parse(question.query)
            add_highlights(items, stored, index.match_spans(query))

        await request.with_stored(items, add, len(question.query), stage="highlight")
    await request.add_fields(items, question.fields)


# ---------------------------------------------------------------- items that match a text


@dataclass(frozen=True, slots=True, eq=False)
class SearchOutcome:
    """Items matched by a text, and the memory's scores of those that it re-ranked."""

    found: SearchResults
    parsed: ParsedQuery | None  # the query; None without a BM25 index
    scores: Scores  # of [P] items; of none without a memory
    places: Sequence[int]  # [L] of the items found among those, -1 = not re-ranked
    reasons: Sequence[Sequence[Reason]]  # of each item found, if they were asked for
    counted: Counted | None = None  # values of all matches, if they were asked for
    cursor: str | None = None  # of the next page
    warnings: tuple[WarningOut, ...] = ()


def search_items(
    question: SearchIn,
    snapshot: Snapshot,
    user: UserMemory,
    setup: SearchSetup,
    *,
    allowed: NDArray[np.bool_],
    options: AttentionOptions,
    steering: ItemSteering = NO_STEERING,
    events: EventColumns = EMPTY,
    offset: int = 0,
) -> SearchOutcome:
    """Rank the items that match a text best.

    Args:
        user: from `build_memory` with the same snapshot; an empty one re-ranks nothing.
        setup: encodes the query, and weighs the kinds of match.
        allowed: bool [N], what may be answered.
        options: for both attentions, to the field keys and to the user's memory.
        steering: of the same catalogue, without exploration.
        events: of the memory, which reasons are about.
        offset: items before the page.
    """
    end = offset + question.limit
    parsed, matches = match_text(
        question.query,
        snapshot,
        setup.encode,
        allowed=allowed,
        options=options,
        parameters=setup.parameters,
        depth=end + 1,
    )
    near = nearest(matches, max(RERANKED, question.limit)) if len(user) else np.zeros(0, np.int64)
    scores = score(snapshot, user, near, options)
    personal = (
        personal_bias(snapshot, scores, near, question.personal_weight) if len(user) else None
    )
    # One item more than the page tells whether there is another page.
    found = search(
        matches,
        limit=end + 1,
        personal=personal,
        steering=steering,
        fill=question.fill,
        min_score=question.min_score,
    )
    cursor, is_cut = None, len(found.rows) > end
    if is_cut and end + question.limit <= MAX_RANKED:
        cursor, is_cut = _encoded(end), False
    found = take(found, range(offset, end))
    place_of = {row: place for place, row in enumerate(near.tolist())}
    places = [place_of.get(row, -1) for row in found.rows.tolist()]
    reasons = explain_items(
        snapshot,
        user,
        found.rows,
        scores,
        options=options,
        top=question.explain,
        effects=question.effects,
        events=events,
        places=places,
    )
    counted, warnings = None, _bounds(matches)
    if question.facets:
        mask, warnings = matched_items(snapshot, parsed, matches, allowed, question.min_score)
        counted = count_items(snapshot, mask, question.facets)
        if counted is not None and warnings:
            counted = Counted(None, counted.facets)
    warnings += _unmeant(snapshot, parsed, matches, found)
    if question.filter != EVERYTHING and len(found.rows):
        warnings += _unworded(snapshot, parsed, matches)
    if is_cut:
        told = f"a search ranks {MAX_RANKED:,} items: more match, which a `sort` lists"
        warnings += _warning(told, "/limit")
    return SearchOutcome(found, parsed, scores, places, reasons, counted, cursor, warnings)


def matched_items(
    snapshot: Snapshot,
    parsed: ParsedQuery | None,
    matches: FieldMatches,
    allowed: NDArray[np.bool_],
    min_score: float | None = None,
) -> tuple[NDArray[np.bool_], tuple[WarningOut, ...]]:
    """Mask the matches of a text, bool [N], and say if there may be more.

    These are the allowed items that have one of its words, and those that match by the floor of
    `search`; with a `min_score`, the latter only.
    """
    mask = np.zeros(len(allowed), np.bool_)
    index, warnings = snapshot.catalogue.bm25_index, _bounds(matches)
    if index is not None and parsed is not None and min_score is None:
        rows = index.rows_with_words(parsed, MAX_MATCHES)
        mask[rows] = True
        if len(rows) == MAX_MATCHES:
            warnings += _warning(
                f"more than {MAX_MATCHES:,} items have words of it: the others are not counted"
            )
    mask[strong_matches(matches, min_score)] = True
    return mask & allowed, warnings


def _bounds(matches: FieldMatches) -> tuple[WarningOut, ...]:
    """Say if keywords begin as a query that were not looked up."""
    if not matches.keywords.is_cut:
        return ()
    return _warning(
        f"more than {MAX_COMPLETED:,} identifiers begin so: items of the others are left out"
    )


def _warning(detail: str, pointer: str = "/query") -> tuple[WarningOut, ...]:
    return (WarningOut(pointer=pointer, detail=detail),)


def _unworded(
    snapshot: Snapshot, parsed: ParsedQuery | None, matches: FieldMatches
) -> tuple[WarningOut, ...]:
    """Say if a filter leaves out all items with a word of the query, and meaning finds others."""
    index = snapshot.catalogue.bm25_index
    if index is None or parsed is None or matches.bm25.any() or len(matches.keywords.rows):
        return ()
    if not len(index.rows_with_words(parsed, 1)):
        return ()
    return _warning(
        "no item that passes the filter has a word of it: these are near to it in meaning"
    )


def _unmeant(
    snapshot: Snapshot, parsed: ParsedQuery | None, matches: FieldMatches, found: SearchResults
) -> tuple[WarningOut, ...]:
    """Say why a query of several words, most of which the best item lacks, finds little by meaning.

    A description or an embedding is what meaning is compared with.
    """
    catalogue = snapshot.catalogue
    index, names = catalogue.bm25_index, {*catalogue.keys.names}
    if index is None or parsed is None or len(parsed.terms) < _MEANT or parsed.phrases:
        return ()
    if len(found.rows):
        title = catalogue.titles[int(found.rows[0])]
        if 2 * len(index.match_spans(parsed)(title)) > len(parsed.terms):
            return ()
    if not matches.parameters.meaning:
        return _warning("only words are compared: meaning has the weight 0 in this catalogue")
    if not names & {"description", EMBEDDING}:
        return _warning(
            "no item has a description: meaning is compared with titles and labels only"
        )
    return ()


def match_text(
    text: str,
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    *,
    allowed: NDArray[np.bool_],
    options: AttentionOptions = DEFAULT_OPTIONS,
    parameters: SearchParameters = DEFAULTS,
    depth: int = 0,
) -> tuple[ParsedQuery | None, FieldMatches]:
    """Parse a text, and match it against the BM25 index and the field keys of allowed items [N].

    At least `depth` items are ranked by their words.
    """
    index, parsed, keywords = snapshot.catalogue.bm25_index, None, NO_KEYWORDS
    hits: Callable[[], Hits] | None = None
    if index is not None:
        parsed = index.parser.parse(text)
        text = parsed.text
        keywords = allowed_keywords(index.keyword_hits(parsed), allowed)
        rows = index.rows_with_phrases(parsed)
        if rows is not None:  # only items with the phrases of the query
            allowed, candidates = np.zeros_like(allowed), allowed
            allowed[rows] = candidates[rows]
        hits = partial(index.search, parsed, max(BM25_HITS, depth), allowed)
        if snapshot.key_index is not None:
            hits = _BM25.submit(hits).result
    text = text.strip()
    vector = encode(text) if text else np.zeros(snapshot.catalogue.dimension, np.float32)
    matches = match_fields(
        snapshot,
        vector,
        allowed=allowed,
        options=options,
        hits=hits,
        parameters=parameters,
        keywords=keywords,
    )
    if parsed is not None and _is_nonsense(parsed, matches, encode):
        nothing = np.zeros_like(allowed)
        matches = match_fields(snapshot, vector, allowed=nothing, parameters=parameters)
        parsed = parsed._replace(terms=(), phrases=(), compounds=())
    return parsed, matches


def _is_nonsense(
    parsed: ParsedQuery, matches: FieldMatches, encode: Callable[[str], NDArray[np.float32]]
) -> bool:
    """Report whether a query has no known word, nor comes nearer to any key than nonsense does.

    A few common words among unknown ones are none. Nothing is nonsense if words do not count.
    """
    if parsed.keywords or parsed.coverage >= KNOWN_WORDS or not matches.parameters.lexical:
        return False
    return matches.best_cosine < meaning_floor(matches.catalogue.keys, encode)


def describe_query(
    answer: AnswerOut,
    question: SearchIn,
    catalogue: Catalogue,
    parsed: ParsedQuery | None,
    *,
    found: bool,
) -> None:
    """Add to an answer how its query was understood, and whether nothing matches."""
    if parsed is not None and (index := catalogue.bm25_index) is not None:
        title_of, offered = catalogue.titles.__getitem__, parsed.did_you_mean
        if parsed.corrections:
            answer["corrections"] = {
                word: [index.as_written(each, title_of) for each in words]
                for word, words in parsed.corrections.items()
            }
        if offered is not None:
            answer["did_you_mean"] = index.as_written(offered, title_of, question.query)
    written = question.query.strip()
    if found or not written:
        return
    among = "no item"
    if question.memory == "history":
        among = "no item of the history"
    if question.filter != EVERYTHING:
        among += " that passes the filter"
    shown = written if len(written) <= _SHOWN else written[:_SHOWN] + "…"
    warn(answer, _warning(f"{among} matches {shown!r}"), first=True)


def search_answer(
    question: SearchIn,
    snapshot: Snapshot,
    outcome: SearchOutcome,
    explanations: Sequence[tuple[Contribution, ...]],
    steered: SteeredItems = UNSTEERED,
) -> AnswerOut:
    """Make the answer to a search; without a user or a history there is nobody to explain by."""
    found, scores, catalogue = outcome.found, outcome.scores, snapshot.catalogue
    masses = scores.mass.tolist()
    parts = _parts(found)
    totals = np.sum(list(parts.values()), axis=0).tolist()
    columns = {name: numbers.tolist() for name, numbers in parts.items()}
    items: list[AnsweredItemOut] = [
        {
            "item_id": item_id,
            "score": totals[place],
            "title": title,
            "parts": {name: numbers[place] for name, numbers in columns.items()},
            "weight": weight,
            "matched": by_field,
        }
        for place, (item_id, title, weight, by_field) in enumerate(
            zip(
                catalogue.vocabulary.ids_of(found.rows.tolist()),
                catalogue.titles.take(found.rows),
                found.weights.tolist(),
                found.matched,
                strict=True,
            )
        )
    ]
    for place in np.flatnonzero(np.isneginf(found.scores)).tolist():
        del items[place]["score"], items[place]["parts"]  # a pin that was not compared
    for item, place in zip(items, outcome.places, strict=True):
        if place >= 0:
            item["mass"] = masses[place]
    if question.explain and (question.user_id is not None or question.history is not None):
        personal, count = scores.personal.tolist(), scores.memory_rows
        for item, explanation, place in zip(items, explanations, outcome.places, strict=True):
            item["explanation"] = write_explanation(explanation)
            if place >= 0:
                item["remainder"] = remainder_of(explanation, personal[place], count)
    is_asked = bool(scores.memory_rows)
    answer = answer_of(
        snapshot,
        items,
        retrieval=scores.mode if found.mode == "exact" and is_asked else found.mode,
        keys_attended=found.keys,
        mass=found.mass,
    )
    if is_asked:
        answer["rows_scanned"] = round(scores.rows_scanned)
        answer["memory_rows"] = scores.memory_rows
    if outcome.cursor is not None:
        answer["cursor"] = outcome.cursor
    warn(answer, outcome.warnings)
    if found.moved:
        steered.describe(answer, SteeredRows(found.rows.astype(np.int64), found.moved))
    found_some = any("score" in item for item in items)
    describe_query(answer, question, snapshot.catalogue, outcome.parsed, found=found_some)
    return answer


def _parts(found: SearchResults) -> dict[str, NDArray[np.float64]]:
    """Return the addends [L] of the scores by name, -inf for an item that was not compared."""
    scores = found.scores.astype(np.float64)
    parts = {"match": scores}
    if found.personal is not None:
        parts = {"match": scores - found.personal, "memory": found.personal.astype(np.float64)}
    if found.boosts is not None:
        parts["rules"] = found.boosts.astype(np.float64)
    return parts


# ------------------------------------------------------------ lists in the order of fields


def list_items(
    question: SearchIn,
    snapshot: Snapshot,
    mask: NDArray[np.bool_],
    quotas: Sequence[Quota] = (),
) -> AnswerOut:
    """Return a page of the items of a mask [N], in the order of the question.

    Quotas hold for the whole list, so that each page goes on where the one before it ended.

    Raises `Invalid` for a cursor that is not of this order.
    """
    catalogue = snapshot.catalogue
    order = question.sort or NEWEST_FIRST
    keys = [SortKey(each.field, each.order == "desc") for each in order]
    after = None if question.cursor is None else _position(question.cursor, order)
    rows = matched = np.flatnonzero(mask)
    if quotas:
        needed = len(rows) if after is not None else question.offset + question.limit + 1
        whole = sorted_rows(catalogue.fields, rows, keys, limit=len(rows))
        counts = QuotaCounts.over(catalogue.fields, quotas, whole)
        rows = whole[take_first(np.arange(len(whole)), counts, needed)]
        rows = np.sort(rows)
    # One item more than the page tells whether there is another page.
    page = sorted_rows(
        catalogue.fields, rows, keys, limit=question.limit + 1, offset=question.offset, after=after
    )
    listed, cursor = page[: question.limit], None
    if len(page) > len(listed):
        cursor = _cursor(order, position(catalogue.fields, int(listed[-1]), keys))
    items: list[AnsweredItemOut] = [
        {"item_id": item_id, "title": title}
        for item_id, title in zip(
            catalogue.vocabulary.ids_of(listed.tolist()), catalogue.titles.take(listed), strict=True
        )
    ]
    answer = answer_of(snapshot, items, total=len(matched))
    if cursor is not None:
        answer["cursor"] = cursor
    return answer


def _encoded(document: object) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(document)).decode()


def _decoded(cursor: str) -> Any:
    """Return what `_encoded` was given; None of another text."""
    try:
        return orjson.loads(base64.urlsafe_b64decode(cursor))
    except ValueError:  # of either library
        return None


def _page_offset(cursor: str, most: int) -> int:
    """Return the offset [≤ most] of a page of a search. Raises `Invalid`."""
    offset = _decoded(cursor)
    if isinstance(offset, int) and not isinstance(offset, bool) and 0 <= offset <= most:
        return offset
    raise Invalid("/cursor", "is no cursor of a search")


def _cursor(order: Sequence[SortIn], place: SortPosition) -> str:
    values = [[*value] for value in place.values]  # orjson takes no named tuples
    return _encoded([_written(order), values, place.item_id])


def _written(order: Sequence[SortIn]) -> list[list[object]]:
    return [[key.field, key.order == "desc"] for key in order]


def _position(cursor: str, order: Sequence[SortIn]) -> SortPosition:
    """Return the position that `_cursor` wrote. Raises `Invalid`."""
    try:
        fields, values, item_id = _decoded(cursor)
        if fields == _written(order) and len(values) == len(order):
            return SortPosition(tuple(map(_sorted_value, values)), str(item_id))
    except (ValueError, TypeError):
        pass
    raise Invalid("/cursor", "is no cursor of a list in this order")


def _sorted_value(pair: Sequence[object]) -> SortedValue:
    """Return what `SortedValue` holds. Raises `TypeError`, `ValueError`."""
    number, keyword = pair
    if not isinstance(number, float | int | None) or not isinstance(keyword, str | bool | None):
        raise TypeError
    return SortedValue(number, keyword)
