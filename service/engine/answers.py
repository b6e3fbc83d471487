"""The questions: score, recommend, search, similar, attend. Each is answered from one snapshot."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from models.ranking.explain import Reason
from models.ranking.recommend import Ranked
from models.ranking.scoring import Scores, score
from models.ranking.search_parameters import DEFAULTS, SearchParameters
from service.domain.errors import Invalid, NotFound
from service.domain.queries import (
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
from service.domain.stage_clock import StageClock
from service.engine.attend import attend_catalogue, attend_user, attend_vectors, vector_of
from service.engine.explain import reasons_of
from service.engine.highlight import highlights
from service.engine.recommend import allowed_items, recommended
from service.engine.search import PERSONAL, Searched, found_answer, search_items
from service.engine.similar_items import similar_items, spaces_asked
from service.histories.long_histories import LONG
from service.histories.memory_provider import MemoryProvider
from service.histories.request_history import HistoryAssembler, RequestHistory
from service.snapshots.live_snapshot import LiveSnapshot
from service.snapshots.text_embeddings import EmbeddingCache

T = TypeVar("T")
Rows = NDArray[np.int64]

_AT_ONCE = 120_000  # targets times rows that are attended in a millisecond or two
_KEY = 10  # of those that comparing one field key takes as long as


class Answering:
    """Answers questions from the snapshot and from histories that are never older than the store.

    Args:
        serving: holds the snapshot.
        pasts: makes the past of whoever asks.
        embeddings: encodes queries.
        workers: where computing is done, beside the event loop.
        memories: of whoever asks.
        searching: what a match of a search is worth.
        clock: microseconds UTC.
    """

    def __init__(
        self,
        serving: LiveSnapshot,
        pasts: HistoryAssembler,
        embeddings: EmbeddingCache,
        *,
        workers: Executor,
        memories: MemoryProvider,
        searching: SearchParameters = DEFAULTS,
        clock: Callable[[], int],
    ) -> None:
        self._serving = serving
        self._pasts = pasts
        self._embeddings = embeddings
        self._workers = workers
        self._memories = memories
        self._searching = searching
        self._clock = clock

    async def score(self, query: ScoreQuery, stages: StageClock) -> Answer:
        """Score targets. Raises `Invalid` naming the first target that has no vector."""
        snapshot, asked, at = await self._ask(query.requester, stages)
        targets = snapshot.catalogue.rows(query.item_ids)
        answerable = snapshot.is_scorable(targets)
        if not answerable.all():
            place = int(np.argmin(answerable))
            raise NotFound(f"/item_ids/{place}: no item {query.item_ids[place]!r} in the catalogue")
        options = self._memories.options(query.requester)

        def answer() -> tuple[Scores, list[list[Reason]]]:
            with self._memories.of(snapshot, query.requester, asked, at) as user:
                scores = score(snapshot, user, targets, options)
                self._memories.audit.sample(snapshot, user, targets, scores, options)
                return scores, reasons_of(
                    snapshot, user, targets, scores, options=options, requester=query.requester
                )

        scores, reasons = await self._compute(
            stages, "attend", answer, _work(query.requester, asked, len(targets))
        )
        return await self._answer(
            snapshot,
            query.requester,
            asked,
            rows=targets,
            scores=scores,
            reasons=reasons,
            stages=stages,
        )

    async def recommend(self, query: RecommendQuery, stages: StageClock) -> Answer:
        """Recommend items."""
        snapshot, asked, at = await self._ask(query.requester, stages)
        options = self._memories.options(query.requester)

        def answer() -> tuple[Ranked, list[list[Reason]]]:
            with self._memories.of(snapshot, query.requester, asked, at) as user:
                ranked = recommended(query, snapshot, user, asked, options)
                self._memories.audit.sample(snapshot, user, ranked.rows, ranked.scores, options)
                reasons = reasons_of(
                    snapshot,
                    user,
                    ranked.rows,
                    ranked.scores,
                    options=options,
                    requester=query.requester,
                )
                return ranked, reasons

        ranked, reasons = await self._compute(stages, "attend", answer)
        answered = await self._answer(
            snapshot,
            query.requester,
            asked,
            rows=ranked.rows,
            scores=ranked.scores,
            reasons=reasons,
            stages=stages,
        )
        return replace(answered, retrieval=ranked.mode)

    async def search(self, query: SearchQuery, stages: StageClock) -> Answer:
        """Search items by text; the memory of whoever asks re-ranks what was found.

        Reasons are of the score by which it does.
        """
        snapshot, asked, at = await self._ask(query.requester, stages)
        options = self._memories.options(query.requester)

        def answer() -> Searched:
            with self._memories.of(snapshot, query.requester, asked, at) as user:
                allowed = allowed_items(snapshot, query.filter)
                return search_items(
                    query,
                    snapshot,
                    user,
                    self._embeddings.query,
                    allowed=allowed,
                    options=options,
                    parameters=self._searching,
                )

        work = math.inf
        if self._embeddings.quick:
            work = _KEY * len(snapshot.catalogue.keys) + _work(query.requester, asked, PERSONAL)
        searched = await self._compute(stages, "attend", answer, work)
        with stages("explain"):
            named = await self._pasts.explained(
                snapshot, query.requester.user_id, asked, searched.reasons
            )
        answered = found_answer(query.requester, snapshot, searched, named)
        words, reading = snapshot.catalogue.bm25_index, searched.reading
        if query.highlight and words is not None and reading is not None:
            with stages("store"):
                items = await self._serving.items([item["item_id"] for item in answered.items])
            with stages("highlight"):
                spans_of = partial(words.marks, reading)
                for found, item in zip(answered.items, items, strict=True):
                    found["highlights"] = {} if item is None else highlights(item, spans_of)
        return replace(answered, degraded=self._serving.degraded)

    async def similar(self, query: SimilarQuery, stages: StageClock) -> Answer:
        """Items like one. Raises `NotFound`, and `Invalid` where it has no key in that space."""
        with stages("store"):
            snapshot = await self._serving.current()
        spaces = spaces_asked(query, snapshot)
        answered = await self._compute(
            stages, "attend", lambda: similar_items(query, snapshot, spaces)
        )
        return replace(answered, degraded=self._serving.degraded)

    async def attend(self, query: AttendQuery, stages: StageClock) -> AttendResult:
        """The bare operator. Raises `Invalid` where dimensions do not fit, `NotFound`."""
        with stages("store"):
            snapshot = await self._serving.current()
        asked: int | NDArray[np.float32]
        if query.item_id is not None:
            asked, vector = vector_of(snapshot, query.item_id)
        elif query.text is not None:
            asked = vector = self._embeddings.query(query.text)
        elif query.vector is not None:
            asked = vector = query.vector
        else:
            raise Invalid("/query", "one of vector, item_id and text must be given")
        memory, exact_up_to = query.memory, self._memories.exact_up_to
        if isinstance(memory, VectorMemory):
            return await self._compute(
                stages, "attend", lambda: attend_vectors(query, memory, vector, exact_up_to)
            )
        if not isinstance(memory, StoredUserMemory):
            return await self._compute(
                stages,
                "attend",
                lambda: attend_catalogue(query, snapshot, asked, exact_up_to),
            )
        requester = Requester(user_id=memory.user_id, visible=query.visible, at=query.at)
        snapshot, past, at = await self._ask(requester, stages)

        def answer() -> tuple[AttendResult, UserMemory]:
            user = build_memory(snapshot, past.history, at)  # every event is a row
            return attend_user(query, snapshot, user, asked), user

        attended, user = await self._compute(stages, "attend", answer)
        sources = [int(user.source[row]) for row in attended.rows]
        with stages("explain"):
            ids = await self._pasts.names(memory.user_id, past, sources)
        return replace(attended, ids=ids)

    # ------------------------------------------------------------------ the parts

    async def _ask(
        self, requester: Requester, stages: StageClock
    ) -> tuple[Snapshot, RequestHistory, int]:
        """One snapshot, what the requester did, and the request's time."""
        at = self._clock() if requester.at is None else requester.at
        with stages("store"):
            # The history first: what it names is then in the catalogue that is read after it.
            stored = await self._pasts.history(requester.user_id)
            snapshot = await self._serving.current()
        asked = self._memories.asked(snapshot, requester, stored)
        return snapshot, asked or self._pasts.assemble(snapshot, requester, stored, at), at

    async def _compute(
        self, stages: StageClock, stage: str, work: Callable[[], T], size: float = math.inf
    ) -> T:
        """Run `work` off the event loop, or on it where it takes less than going there and back.

        size: targets times rows; inf = not known.
        """
        with stages(stage):
            if size <= _AT_ONCE:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    async def _answer(
        self,
        snapshot: Snapshot,
        requester: Requester,
        asked: RequestHistory,
        *,
        rows: NDArray[np.int32] | Rows,
        scores: Scores,
        reasons: Sequence[Sequence[Reason]],
        stages: StageClock,
    ) -> Answer:
        catalogue = snapshot.catalogue
        with stages("explain"):
            named = await self._pasts.explained(snapshot, requester.user_id, asked, reasons)
        reason = snapshot.memory_reason if scores.memory else "popular"
        columns = zip(
            catalogue.vocabulary.ids_of(rows.tolist()),
            scores.total.tolist(),
            catalogue.titles.take(rows),
            scores.sequence.tolist(),
            scores.transitions.tolist(),
            scores.attention.tolist(),
            scores.prior.tolist(),
            scores.mass.tolist(),
            strict=True,
        )
        items: list[AnswerItem] = [
            {
                "item_id": item_id,
                "score": total,
                "title": title,
                "parts": {
                    "sequence": sequence,
                    "transitions": transitions,
                    "attention": attention,
                    "prior": prior,
                },
                "reason": reason,
                "mass": mass,
            }
            for item_id, total, title, sequence, transitions, attention, prior, mass in columns
        ]
        if requester.explain:
            for item, explanation in zip(items, named, strict=True):
                item["explanation"] = explanation
        if scores.error is not None:
            for item, error in zip(items, scores.error.tolist(), strict=True):
                item["relative_error"] = error
        scanned = None if scores.scanned is None else round(scores.scanned)
        return Answer(
            items,
            snapshot.version,
            scores.mode,
            degraded=self._serving.degraded,
            rows_scanned=scanned,
        )


def _work(requester: Requester, asked: RequestHistory, targets: int) -> float:
    """Targets times rows of one question; inf where that does not say how long it takes."""
    # Of longer histories the older events may be held by whoever else attends to them.
    known = not requester.explain and len(asked.rows) < LONG
    return targets * max(1, len(asked.rows)) if known else math.inf
