"""Score and recommend: items by a person's memory, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from models.ranking.explanation import Reason
from models.ranking.recommend import LONG_CANDIDATES, Ranked, best_scores, recommend
from models.ranking.scoring import Scores, score
from models.ranking.steering import ItemSteering
from service.domain.errors import NotFound
from service.engine.explanation import Contribution, explain_items, remainder_of, write_explanation
from service.engine.pipeline import Request, answer_of
from service.engine.selection import UNSTEERED, Counted, count_items, warn
from service.questions.answers import AnsweredItemOut, AnswerOut
from service.questions.asked import PersonalQuestion, RecommendIn, ScoreIn

_ITEM = 5  # targets times rows that are attended while one item is looked at by the coarse step
ItemRows = NDArray[np.int32] | NDArray[np.int64]


async def score_items(request: Request[ScoreIn]) -> AnswerOut:
    """Score targets. Raises `NotFound` naming the first target that is not known."""
    question = request.question
    await request.open_for(question)
    snapshot, item_ids = request.snapshot, question.item_ids
    targets = snapshot.catalogue.rows(item_ids)
    known = snapshot.is_known(targets)
    if not known.all():
        place = int(np.argmin(known))
        raise NotFound(f"/item_ids/{place}: no item {item_ids[place]!r} in the catalogue")

    size, boosts, applied = request.size(len(targets), question.explain), None, None
    if question.rules:
        applied = await request.apply_rules(question.rules)
        boosts = applied.boost
    if boosts is not None:
        size = math.inf  # the best items of the catalogue are scored too

    def rank(user: UserMemory) -> tuple[ItemRows, Scores]:
        scores = score(snapshot, user, targets, request.options)
        if boosts is None:
            return targets, scores
        best = best_scores(snapshot, user, snapshot.catalogue.servable, request.options)
        scaled = ItemSteering(boosts, is_relative=True).scaled(best).boosts_of(targets)
        return targets, scores if scaled is None else scores.with_boost(scaled)

    answer = await _ranked(request, rank, size)
    if applied is not None:
        applied.describe(answer["items"], targets)
        warn(answer, applied.warnings)
    await request.add_fields(answer["items"], question.fields)
    return request.finish(answer)


async def recommend_items(request: Request[RecommendIn]) -> AnswerOut:
    """Recommend items of the catalogue."""
    question = request.question
    await request.open_for(question)
    snapshot = request.snapshot
    selection = await request.select(question.filter, question.facets)
    selection, steered = await request.steer(question, selection)
    outcome: list[Ranked] = []

    def excluded() -> NDArray[np.int64]:
        return request.excluded_rows(question.exclude, seen=question.exclude_seen)

    def rank(user: UserMemory) -> tuple[ItemRows, Scores]:
        ranked = recommend(
            snapshot,
            user,
            limit=question.limit,
            allowed=selection.allowed,
            excluded=excluded(),
            diversity=question.diversity,
            options=request.options,
            steering=steered.steering,
        )
        outcome.append(ranked)
        return ranked.rows, ranked.scores

    def count() -> Counted | None:
        mask = selection.allowed.copy()
        mask[excluded()] = False
        return count_items(snapshot, mask, question.facets)

    size = math.inf
    if steered is UNSTEERED and not question.diversity:
        targets = max(LONG_CANDIDATES, 4 * question.limit)
        size = request.size(targets, question.explain) + _ITEM * len(snapshot.catalogue)
    answer = await _ranked(request, rank, size)
    answer["candidates"] = outcome[0].compared
    steered.describe(answer, outcome[0])
    selection.describe(answer, await request.compute(count) if question.facets else None)
    await request.add_fields(answer["items"], question.fields)
    return request.finish(answer)


async def _ranked(
    request: Request[ScoreIn] | Request[RecommendIn],
    rank: Callable[[UserMemory], tuple[ItemRows, Scores]],
    size: float = math.inf,
) -> AnswerOut:
    """Answer with the items that `rank` returns, explained."""
    question: PersonalQuestion = request.question
    snapshot, options = request.snapshot, request.options

    def attend(user: UserMemory) -> tuple[ItemRows, Scores, list[list[Reason]]]:
        rows, scores = rank(user)
        reasons = explain_items(
            snapshot,
            user,
            rows,
            scores,
            options=options,
            top=question.explain,
            effects=question.effects,
            events=request.events,
        )
        return rows, scores, reasons

    rows, scores, reasons = await request.attend(attend, size)
    named = await request.name(reasons) if question.explain else ()
    return answer_of(
        snapshot,
        scored_items(snapshot, rows, scores, named),
        retrieval=scores.mode,
        rows_scanned=round(scores.rows_scanned),
        memory_rows=scores.memory_rows,
    )


def scored_items(
    snapshot: Snapshot,
    rows: ItemRows,
    scores: Scores,
    explanations: Sequence[tuple[Contribution, ...]] = (),
) -> list[AnsweredItemOut]:
    """Return the items of rows [L] with their scores, part by part, and their explanations."""
    catalogue = snapshot.catalogue
    reason = snapshot.memory_reason if scores.memory_rows else "popular"
    columns = zip(
        catalogue.vocabulary.ids_of(rows.tolist()),
        scores.total.tolist(),
        catalogue.titles.take(rows),
        _parts(scores),
        scores.mass.tolist(),
        strict=True,
    )
    items: list[AnsweredItemOut] = [
        {
            "item_id": item_id,
            "score": total,
            "title": title,
            "parts": parts,
            "reason": reason,
            "mass": mass,
        }
        for item_id, total, title, parts, mass in columns
    ]
    if explanations:
        personal, count = scores.personal.tolist(), scores.memory_rows
        for item, explanation, whole in zip(items, explanations, personal, strict=True):
            item["explanation"] = write_explanation(explanation)
            item["remainder"] = remainder_of(explanation, whole, count)
    if scores.relative_error is not None:
        for item, error in zip(items, scores.relative_error.tolist(), strict=True):
            item["relative_error"] = error
    return items


def _parts(scores: Scores) -> list[dict[str, float]]:
    """Return the parts of each score by name: as `Scores.parts`, with a literal for most of them.

    To make dictionaries of names and values takes three times as long.
    """
    parts = scores.parts
    attention, transitions, prior = (
        parts.pop(name).tolist() for name in ("attention", "transitions", "prior")
    )
    similarity = parts.pop("similarity", None)
    if similarity is None:
        found = [
            {"attention": a, "transitions": t, "prior": p}
            for a, t, p in zip(attention, transitions, prior, strict=True)
        ]
    else:
        found = [
            {"attention": a, "transitions": t, "similarity": s, "prior": p}
            for a, t, s, p in zip(attention, transitions, similarity.tolist(), prior, strict=True)
        ]
    for name, part in parts.items():
        for by_name, value in zip(found, part.tolist(), strict=True):
            by_name[name] = value
    return found
