"""Answers to score, recommend, search, similar and attend, each from one snapshot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from models.ranking.explanation import Reason
from models.ranking.recommend import Ranked, best_scores
from models.ranking.scoring import Scores, score
from models.ranking.steering import ItemSteering
from models.text.query_parser import ParsedQuery
from service.domain.errors import Invalid, NotFound
from service.domain.item_selection import comparisons
from service.domain.queries import (
    MAX_RANKED,
    Answer,
    AnswerItem,
    AttendQuery,
    AttendResult,
    RecommendQuery,
    Requester,
    ScoreQuery,
    SearchQuery,
    SimilarQuery,
    StoredUserMemory,
    VectorMemory,
)
from service.domain.records import Item
from service.domain.stage_clock import StageClock
from service.domain.steering import NO_STEERING
from service.engine.compose import Parts
from service.engine.explanation.naming import name_reasons, name_rows
from service.engine.explanation.reasons import explain_items
from service.engine.highlight import add_highlights
from service.engine.questions.attend import (
    attend_catalogue,
    attend_user,
    attend_vectors,
    content_of,
)
from service.engine.questions.recommend import excluded_rows, recommend_items
from service.engine.questions.score import ItemRows, item_row, score_answer
from service.engine.questions.search import (
    RERANKED,
    SearchOutcome,
    list_matches,
    search_answer,
    search_items,
)
from service.engine.questions.search_history import history_answer, search_history
from service.engine.questions.similar_items import similar_items
from service.engine.request_steps import OpenRequest, RequestSteps
from service.engine.selection.item_selection import (
    Counted,
    ItemSelection,
    count_items,
    select_items,
)
from service.engine.selection.listing import page_offset
from service.engine.selection.steering import SteeredItems, apply_rules, steer_items

_FIELD_KEY = 10  # targets times rows that are attended while one field key is compared
_SHORT = 200  # characters of a query whose words are looked up on the event loop


class Answers:
    """Answers requests from the live snapshot and from events never older than the store."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._steps = parts, RequestSteps(parts)

    async def score(self, query: ScoreQuery, stages: StageClock) -> Answer:
        """Score targets. Raises `NotFound` naming the first target that is not known."""
        request = await self._steps.open(query.requester, stages)
        snapshot = request.snapshot
        targets = snapshot.catalogue.rows(query.item_ids)
        known = snapshot.is_known(targets)
        if not known.all():
            place = int(np.argmin(known))
            raise NotFound(f"/item_ids/{place}: no item {query.item_ids[place]!r} in the catalogue")

        rules = await self._steps.filter(
            snapshot,
            partial(apply_rules, snapshot, query.rules),
            stages,
            sum(comparisons(rule.when) for rule in query.rules),
        )
        steering, size = ItemSteering(rules.boost, is_relative=True), request.size(len(targets))
        if rules.boost is not None:
            size = math.inf  # the best items of the catalogue are scored too

        def rank(user: UserMemory) -> tuple[ItemRows, Scores]:
            scores = score(snapshot, user, targets, request.options)
            if rules.boost is None:
                return targets, scores
            best = best_scores(snapshot, user, snapshot.catalogue.servable, request.options)
            boosts = steering.scaled(best).boosts_of(targets)
            return targets, scores if boosts is None else scores.with_boost(boosts)

        answer = await self._ranked(request, stages, rank, size)
        rules.describe(answer.items, targets)
        if rules.warnings:
            answer = replace(answer, warnings=rules.warnings)
        return await self._steps.complete(answer, query.fields, stages)

    async def recommend(self, query: RecommendQuery, stages: StageClock) -> Answer:
        """Recommend items of the catalogue."""
        request = await self._steps.open(query.requester, stages)
        snapshot, events = request.snapshot, request.events
        selection = await self._select(snapshot, query, stages)

        selection, steered = await self._steer(snapshot, query, selection, stages)
        outcome: list[Ranked] = []

        def rank(user: UserMemory) -> tuple[ItemRows, Scores]:
            ranked = recommend_items(
                query,
                snapshot,
                user,
                events,
                request.options,
                selection.allowed,
                steered.steering,
            )
            outcome.append(ranked)
            return ranked.rows, ranked.scores

        def count() -> Counted | None:
            mask = selection.allowed.copy()
            mask[excluded_rows(query, snapshot, events)] = False
            return count_items(snapshot, mask, query.facets)

        answer = await self._ranked(request, stages, rank)
        answer = replace(answer, candidates=outcome[0].compared)
        answer = steered.describe(answer, outcome[0])
        counted = await self._steps.compute(stages, count) if query.facets else None
        return await self._steps.complete(
            selection.described(answer, counted), query.fields, stages
        )

    async def search(self, query: SearchQuery, stages: StageClock) -> Answer:
        """Search items by text and re-rank them by the requester's memory, or list them.

        For the memory `history`, the items of the answer are `AnswerEvent`s. Explanations are of
        the memory's score. Raises `Invalid` for a cursor of another list.
        """
        if query.memory == "history":
            return await self._search_history(query, stages)
        if query.is_listing:
            return await self._list(query, stages)
        if query.cursor is not None:
            offset = page_offset(query.cursor, MAX_RANKED - query.limit)
            query = replace(query, offset=offset, cursor=None)
        request = await self._steps.open(query.requester, stages)
        snapshot, setup = request.snapshot, self._parts.search.setup
        selection = await self._select(snapshot, query, stages)
        selection, steered = await self._steer(snapshot, query, selection, stages)

        def attend(user: UserMemory) -> SearchOutcome:
            return search_items(
                query,
                snapshot,
                user,
                setup.encode,
                allowed=selection.allowed,
                options=request.options,
                parameters=setup.parameters,
                steering=steered.steering,
                events=request.events,
            )

        size = math.inf
        if setup.quick and len(query.query) <= _SHORT:
            size = _FIELD_KEY * len(snapshot.catalogue.keys) + request.size(RERANKED)
        outcome = await self._steps.attend(request, stages, attend, size)
        with stages("explain"):
            named, is_degraded = await name_reasons(
                self._parts.store, snapshot, request.events, outcome.reasons
            )
        answer = search_answer(query, snapshot, outcome, named, steered)
        answer = selection.described(replace(answer, degraded=is_degraded), outcome.counted)
        return await self._with_texts(query, snapshot, answer, stages, outcome.parsed)

    async def _search_history(self, query: SearchQuery, stages: StageClock) -> Answer:
        """Search the events of the requester by the texts of their items."""
        request = await self._steps.open(query.requester, stages)
        snapshot, events, setup = request.snapshot, request.events, self._parts.search.setup
        selection = await self._select(snapshot, query, stages)
        work = partial(
            search_history,
            query,
            snapshot,
            events,
            setup.encode,
            at=request.at,
            allowed=selection.allowed,
            options=request.options,
            parameters=setup.parameters,
        )
        size = math.inf
        if setup.quick and len(query.query) <= _SHORT:
            size = _FIELD_KEY * len(snapshot.catalogue.keys) + len(events)
        outcome = await self._steps.compute(stages, work, size)
        with stages("explain"):
            named = await name_rows(self._parts.store, snapshot, events, outcome.sources)
        answer = history_answer(query, snapshot, events, outcome, named.ids)
        answer = selection.described(replace(answer, degraded=named.is_degraded))
        return await self._with_texts(query, snapshot, answer, stages, outcome.parsed)

    async def _list(self, query: SearchQuery, stages: StageClock) -> Answer:
        """List items in the order of their fields; whoever asks, the list is the same."""
        with stages("store"):
            snapshot = await self._parts.live.current()
        selection = await self._select(snapshot, query, stages)
        setup = self._parts.search.setup
        options = self._parts.memories.options(query.requester)
        work = partial(
            list_matches,
            query,
            snapshot,
            setup.encode,
            selection=selection,
            options=options,
            parameters=setup.parameters,
        )
        answer = await self._steps.compute(stages, work)
        return await self._with_texts(query, snapshot, answer, stages)

    async def similar(self, query: SimilarQuery, stages: StageClock) -> Answer:
        """Find items like one.

        Raises:
            NotFound: when the catalogue has no such item.
            Invalid: when it has no key in the requested space, but has one in another.
        """
        with stages("store"):
            snapshot = await self._parts.live.current()
        answer = await self._steps.compute(stages, lambda: similar_items(query, snapshot))
        answer = replace(answer, degraded=self._parts.live.degraded)
        return await self._steps.complete(answer, query.fields, stages)

    async def attend(self, query: AttendQuery, stages: StageClock) -> AttendResult:
        """Apply the bare operator. Raises `Invalid` where dimensions do not fit, `NotFound`."""
        with stages("store"):
            snapshot = await self._parts.live.current()
        target: int | NDArray[np.float32]
        if query.item_id is not None:
            target = item_row(snapshot, query.item_id)
        elif query.text is not None:
            target = self._parts.embeddings.query(query.text)
        elif query.vector is not None:
            target = query.vector
        else:
            raise Invalid("/query", "one of vector, item_id and text must be given")
        memory = query.memory
        if isinstance(memory, VectorMemory):
            vector = content_of(snapshot, target) if isinstance(target, int) else target
            return await self._steps.compute(stages, lambda: attend_vectors(query, memory, vector))
        if not isinstance(memory, StoredUserMemory):
            result = await self._steps.compute(
                stages, lambda: attend_catalogue(query, snapshot, target)
            )
            return replace(result, degraded=self._parts.live.degraded)
        requester = Requester(
            user_id=memory.user_id,
            visible=query.visible,
            retrieval=query.retrieval,
            at=query.at,
        )
        request = await self._steps.open(requester, stages)

        def attend() -> tuple[AttendResult, UserMemory]:
            # Every event is a row, in a long history too.
            history = self._parts.memories.history(request.snapshot, request.events, requester)
            user = build_memory(request.snapshot, history, request.at)
            return attend_user(query, request.snapshot, user, target), user

        result, user = await self._steps.compute(stages, attend)
        with stages("explain"):
            sources = [int(user.source[row]) for row in result.rows]
            named = await name_rows(self._parts.store, request.snapshot, request.events, sources)
        is_degraded = named.is_degraded or self._parts.live.degraded
        return replace(result, ids=named.ids, events=named.events, degraded=is_degraded)

    # ------------------------------------------------------------------ the parts

    async def _with_texts(
        self,
        query: SearchQuery,
        snapshot: Snapshot,
        answer: Answer,
        stages: StageClock,
        parsed: ParsedQuery | None = None,
    ) -> Answer:
        """Return an answer to a search with highlights and fields, where they are asked for."""
        index = snapshot.catalogue.bm25_index
        if query.highlight and index is not None and answer.items:
            parser, whole = index.parser, query.query

            def add(items: Sequence[AnswerItem], stored: Sequence[Item | None]) -> None:
                add_highlights(items, stored, index.match_spans(parsed or parser.parse(whole)))

            size = len(query.query)
            answer = await self._steps.add_stored(answer, add, stages, size, stage="highlight")
        answer = replace(answer, degraded=answer.degraded or self._parts.live.degraded)
        return await self._steps.complete(answer, query.fields, stages)

    async def _select(
        self, snapshot: Snapshot, query: RecommendQuery | SearchQuery, stages: StageClock
    ) -> ItemSelection:
        sort = query.sort if isinstance(query, SearchQuery) else ()
        work = partial(select_items, snapshot, query.filter, query.facets, sort)
        return await self._steps.filter(snapshot, work, stages, comparisons(query.filter))

    async def _steer(
        self,
        snapshot: Snapshot,
        query: RecommendQuery | SearchQuery,
        selection: ItemSelection,
        stages: StageClock,
    ) -> tuple[ItemSelection, SteeredItems]:
        """Apply a question's steering; its warnings are the selection's from then on."""
        work = partial(
            steer_items,
            snapshot,
            query.steering,
            allowed=selection.allowed,
            exclude=query.exclude if isinstance(query, RecommendQuery) else (),
            limit=query.limit + (query.offset if isinstance(query, SearchQuery) else 0),
        )
        compared = sum(comparisons(rule.when) for rule in query.steering.rules)
        is_steered = query.steering != NO_STEERING
        steered = await self._steps.filter(snapshot, work, stages, compared + is_steered)
        return selection.with_warnings(steered.warnings), steered

    async def _ranked(
        self,
        request: OpenRequest,
        stages: StageClock,
        rank: Callable[[UserMemory], tuple[ItemRows, Scores]],
        size: float = math.inf,
    ) -> Answer:
        """Answer with the items that `rank` returns, explained."""
        requester, snapshot, events, _, options = request

        def attend(user: UserMemory) -> tuple[ItemRows, Scores, list[list[Reason]]]:
            rows, scores = rank(user)
            reasons = explain_items(
                snapshot,
                user,
                rows,
                scores,
                options=options,
                requester=requester,
                events=events,
            )
            return rows, scores, reasons

        rows, scores, reasons = await self._steps.attend(request, stages, attend, size)
        with stages("explain"):
            named, is_degraded = await name_reasons(self._parts.store, snapshot, events, reasons)
        is_degraded = is_degraded or self._parts.live.degraded
        return score_answer(requester, snapshot, rows, scores, named, degraded=is_degraded)
