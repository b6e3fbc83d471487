"""Search by words and by meaning, re-ranked by the requester's memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.item_values import EMBEDDING
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from models.ranking.explanation import Reason
from models.ranking.lineup import SteeredRows
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
    nearest,
    personal_bias,
    search,
    strong_matches,
    take,
)
from models.ranking.steering import NO_STEERING, ItemSteering
from models.text.bm25 import Hits
from models.text.query_parser import ParsedQuery
from models.text.terms import MAX_COMPLETED, NO_KEYWORDS
from service.domain.item_selection import NO_FILTER, FilterWarning
from service.domain.queries import MAX_RANKED, Answer, AnswerItem, Contribution, SearchQuery
from service.engine.explanation.naming import remainder_of
from service.engine.explanation.reasons import explain_items
from service.engine.selection.item_selection import Counted, ItemSelection, count_items
from service.engine.selection.listing import list_items, page_cursor
from service.engine.selection.steering import UNSTEERED, SteeredItems, steer_items
from service.histories.event_columns import EMPTY, EventColumns

RERANKED = 200  # items matched by text that a user's memory re-ranks
BM25_HITS = 500  # items at most that BM25 contributes
MAX_MATCHES = 100_000  # items with words of a query, the best ones, that are counted or sorted
KNOWN_WORDS = 0.1  # coverage of a query from which on its words are evidence enough
_MEANT = 3  # words of a query from which on it may be meant rather than named
_SHOWN = 60  # characters of a query in a warning

# BM25 and the nearest keys of many items take milliseconds each, and both release the GIL.
_BM25 = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="heed-bm25")


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
    warnings: tuple[FilterWarning, ...] = ()


def search_items(
    query: SearchQuery,
    snapshot: Snapshot,
    user: UserMemory,
    encode: Callable[[str], NDArray[np.float32]],
    *,
    allowed: NDArray[np.bool_],
    options: AttentionOptions,
    parameters: SearchParameters = DEFAULTS,
    steering: ItemSteering = NO_STEERING,
    events: EventColumns = EMPTY,
) -> SearchOutcome:
    """Rank the items that match a text best.

    Args:
        query: the request.
        snapshot: the catalogue.
        user: from `build_memory` with the same snapshot; an empty one re-ranks nothing.
        encode: encodes a text to its vector [D].
        allowed: bool [N], what may be answered.
        options: both are attended, the field keys and the user's memory.
        parameters: weights of the kinds of match.
        steering: of the same catalogue, without exploration.
        events: of the memory, which reasons are about.
    """
    end = query.offset + query.limit
    parsed, matches = match_text(
        query.query,
        snapshot,
        encode,
        allowed=allowed,
        options=options,
        parameters=parameters,
        depth=end + 1,
    )
    near = nearest(matches, max(RERANKED, query.limit)) if len(user) else np.zeros(0, np.int64)
    scores = score(snapshot, user, near, options)
    personal = personal_bias(snapshot, scores, near, query.personal_weight) if len(user) else None
    # One item more than the page tells whether there is another page.
    found = search(
        matches,
        limit=end + 1,
        personal=personal,
        steering=steering,
        fill=query.fill,
        min_score=query.min_score,
    )
    cursor, is_cut = None, len(found.rows) > end
    if is_cut and end + query.limit <= MAX_RANKED:
        cursor, is_cut = page_cursor(end), False
    found = take(found, range(query.offset, end))
    place_of = {row: place for place, row in enumerate(near.tolist())}
    places = [place_of.get(row, -1) for row in found.rows.tolist()]
    reasons = explain_items(
        snapshot,
        user,
        found.rows,
        scores,
        options=options,
        requester=query.requester,
        events=events,
        places=places,
    )
    counted, warnings = None, _bounds(matches)
    if query.facets:
        mask, warnings = matched_items(snapshot, parsed, matches, allowed, query.min_score)
        counted = count_items(snapshot, mask, query.facets)
        if counted is not None and warnings:
            counted = replace(counted, total=None)
    warnings += _unmeant(snapshot, parsed, matches, found)
    if query.filter != NO_FILTER and len(found.rows):
        warnings += _unworded(snapshot, parsed, matches)
    if is_cut:
        told = f"a search ranks {MAX_RANKED:,} items: more match, which a `sort` lists"
        warnings += (FilterWarning("/limit", told),)
    return SearchOutcome(found, parsed, scores, places, reasons, counted, cursor, warnings)


def matched_items(
    snapshot: Snapshot,
    parsed: ParsedQuery | None,
    matches: FieldMatches,
    allowed: NDArray[np.bool_],
    min_score: float | None = None,
) -> tuple[NDArray[np.bool_], tuple[FilterWarning, ...]]:
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
            told = f"more than {MAX_MATCHES:,} items have words of it: the others are not counted"
            warnings += (FilterWarning("/query", told),)
    mask[strong_matches(matches, min_score)] = True
    return mask & allowed, warnings


def _bounds(matches: FieldMatches) -> tuple[FilterWarning, ...]:
    """Say if keywords begin as a query that were not looked up."""
    if not matches.keywords.is_cut:
        return ()
    told = f"more than {MAX_COMPLETED:,} identifiers begin so: items of the others are left out"
    return (FilterWarning("/query", told),)


def _unworded(
    snapshot: Snapshot, parsed: ParsedQuery | None, matches: FieldMatches
) -> tuple[FilterWarning, ...]:
    """Say if a filter leaves out all items with a word of the query, and meaning finds others."""
    index = snapshot.catalogue.bm25_index
    if index is None or parsed is None or matches.bm25.any() or len(matches.keywords.rows):
        return ()
    if not len(index.rows_with_words(parsed, 1)):
        return ()
    told = "no item that passes the filter has a word of it: these are near to it in meaning"
    return (FilterWarning("/query", told),)


def _unmeant(
    snapshot: Snapshot, parsed: ParsedQuery | None, matches: FieldMatches, found: SearchResults
) -> tuple[FilterWarning, ...]:
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
        told = "only words are compared: meaning has the weight 0 in this catalogue"
    elif not names & {"description", EMBEDDING}:
        told = "no item has a description: meaning is compared with titles and labels only"
    else:
        return ()
    return (FilterWarning("/query", told),)


def list_matches(
    query: SearchQuery,
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    *,
    selection: ItemSelection,
    options: AttentionOptions,
    parameters: SearchParameters = DEFAULTS,
) -> Answer:
    """List the items that match a text, or all without one, in the order of their fields.

    The arguments are those of `search_items`; nobody's memory is attended. Raises `Invalid` for a
    cursor of another order.
    """
    mask, parsed, matches = selection.allowed, None, None
    warnings: tuple[FilterWarning, ...] = ()
    if query.query.strip():
        parsed, matches = match_text(
            query.query, snapshot, encode, allowed=mask, options=options, parameters=parameters
        )
        mask, warnings = matched_items(snapshot, parsed, matches, mask)
    steered = steer_items(snapshot, query.steering, allowed=selection.allowed, limit=query.limit)
    selection = selection.with_warnings(steered.warnings + warnings)
    answer = list_items(query, snapshot, mask, steered.steering.quotas)
    if matches is not None:
        answer = replace(answer, retrieval=matches.mode, keys_attended=matches.attended)
    counted = count_items(snapshot, mask, query.facets)
    answer = selection.described(answer, counted)
    if warnings:
        answer = replace(answer, total=None)
    return describe_query(answer, query, parsed, found=mask.any())


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
    """Parse a text and match it against the BM25 index and the field keys.

    The arguments are those of `search_items`; `depth` items are ranked by their words at least.
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

    A few common words among unknown ones are none. Where words do not count, nothing is nonsense.
    """
    if parsed.keywords or parsed.coverage >= KNOWN_WORDS or not matches.parameters.lexical:
        return False
    return matches.best_cosine < meaning_floor(matches.catalogue.keys, encode)


def describe_query(
    answer: Answer, query: SearchQuery, parsed: ParsedQuery | None, *, found: bool | np.bool_
) -> Answer:
    """Return an answer that says how its query was understood, and when nothing was found."""
    if parsed is not None:
        answer = replace(answer, corrections=parsed.corrections, did_you_mean=parsed.did_you_mean)
    if found or not query.query.strip():
        return answer
    among = "no item"
    if query.memory == "history":
        among = "no item of the history"
    if query.filter != NO_FILTER:
        among += " that passes the filter"
    written = query.query.strip()
    shown = written if len(written) <= _SHOWN else written[:_SHOWN] + "…"
    warning = FilterWarning("/query", f"{among} matches {shown!r}")
    return replace(answer, warnings=(warning, *(answer.warnings or ())))


def search_answer(
    query: SearchQuery,
    snapshot: Snapshot,
    outcome: SearchOutcome,
    explanations: Sequence[tuple[Contribution, ...]],
    steered: SteeredItems = UNSTEERED,
) -> Answer:
    """Make the answer to a search; without a user or a history there is nobody to explain by."""
    requester = query.requester
    found, scores, catalogue = outcome.found, outcome.scores, snapshot.catalogue
    masses = scores.mass.tolist()
    parts = _parts(found)
    totals = np.sum(list(parts.values()), axis=0).tolist()
    columns = {name: numbers.tolist() for name, numbers in parts.items()}
    items: list[AnswerItem] = [
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
    for place in np.flatnonzero(~np.isfinite(found.scores)).tolist():
        del items[place]["score"], items[place]["parts"]  # a pin that was not compared
    for item, place in zip(items, outcome.places, strict=True):
        if place >= 0:
            item["mass"] = masses[place]
    if requester.explain and (requester.user_id is not None or requester.history is not None):
        personal, count = scores.personal.tolist(), scores.memory_rows
        for item, explanation, place in zip(items, explanations, outcome.places, strict=True):
            item["explanation"] = explanation
            if place >= 0:
                item["remainder"] = remainder_of(explanation, personal[place], count)
    is_asked = bool(scores.memory_rows)
    answer = Answer(
        items,
        snapshot.version,
        scores.mode if found.mode == "exact" and is_asked else found.mode,
        rows_scanned=round(scores.rows_scanned) if is_asked else None,
        memory_rows=scores.memory_rows if is_asked else None,
        keys_attended=found.keys,
        mass=found.mass,
        cursor=outcome.cursor,
        warnings=outcome.warnings or None,
    )
    if found.moved:
        answer = steered.describe(answer, SteeredRows(found.rows.astype(np.int64), found.moved))
    return describe_query(answer, query, outcome.parsed, found=any("score" in i for i in items))


def _parts(found: SearchResults) -> dict[str, NDArray[np.float64]]:
    """Return the addends [L] of the scores by name, -inf for an item that was not compared."""
    scores = found.scores.astype(np.float64)
    parts = {"match": scores}
    if found.personal is not None:
        parts = {"match": scores - found.personal, "memory": found.personal.astype(np.float64)}
    if found.boosts is not None:
        parts["rules"] = found.boosts.astype(np.float64)
    return parts
