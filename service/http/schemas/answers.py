"""Answers to questions: their documented shape, and their values for JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.domain.queries import Answer, Contribution
from service.http.schemas.ask import EFFECTS_UP_TO
from service.http.schemas.rendering import check_finite, fields_out, written_time
from service.http.schemas.scalars import Id, Timestamp


class ContributionOut(BaseModel):
    """Contribution of one event to one item's score."""

    event_id: str | None
    item_id: str | None
    title: str
    type: str
    timestamp: Timestamp | None
    weight: float = Field(description="Its softmax weight, the mean over heads.")
    contribution: float = Field(
        description="What the event adds to the score, or takes from it where negative: what the "
        "attention loses where the other events take over its weight, its share of the "
        "transitions, and an equal share of what all events that raise the score add together. The "
        "sum over all events and profile entries is the score without `parts.prior`."
    )
    effect: float | None = Field(
        None,
        description="What the score would lose, had the event never happened: the whole model "
        "counts, so that later events are read without it. Effects do not sum to the score. In "
        f"/v1/score of up to {EFFECTS_UP_TO} items unless `explain_effects` is false, elsewhere "
        "with `explain_effects` or `explain_exact`.",
    )
    effect_is_exact: bool | None = Field(
        None,
        description="False where `effect` is an estimate. `explain_exact` computes it, but for the "
        "older events of a long history, which are always estimated.",
    )


class MarkedOut(BaseModel):
    """A span of a text."""

    text: str
    match: bool = Field(description="Whether it is a word of the query.")


class LikenessOut(BaseModel):
    """Similarity of an item to the item of the request, in one space."""

    cosine: float
    share: float = Field(description="Share of the item's weight that this space holds.")


class AnsweredItemOut(BaseModel):
    """One item of an answer, without the fields that its route does not produce."""

    item_id: Id
    score: float
    title: str
    parts: dict[str, float] | None = Field(None, description="The addends of the score, by name.")
    reason: str | None = Field(
        None,
        description="`personal`: from a history, by the trained model; `content`: from a history, "
        "without a model; `popular`: without a history.",
    )
    explanation: list[ContributionOut] | None = Field(
        None,
        description="The events behind the score, by descending contribution: events that raise it "
        "come first, and events that lower it are listed only after all that raise it. In a search "
        "they explain the score that re-ranks, which is the one of /v1/score. Empty without a "
        "memory, and for items too far down to be re-ranked.",
    )
    weight: float | None = Field(None, description="The softmax weight over the item's keys.")
    matched: dict[str, float] | None = Field(
        None, description="The share of the weight that each field's key holds."
    )
    highlights: dict[str, list[MarkedOut]] | None = Field(
        None, description="The title and a snippet of the description, as spans."
    )
    mass: float | None = Field(
        None,
        description="Share of the softmax over the user's memory that was attended row by row.",
    )
    relative_error: float | None = Field(
        None,
        description="Of a long history whose older events were not attended row by row: how far a "
        "head's context behind the score may be off, relative to its length, at 99 % confidence; "
        "the largest of the heads.",
    )
    spaces: dict[Literal["content", "trained"], LikenessOut] | None = Field(
        None,
        description="Of a similar item: how it is, in each space where both items are. The score "
        "is log Σ exp(z) over them, z being the cosine in standard deviations above the mean of "
        "all offered items in that space.",
    )


class AnswerOut(BaseModel):
    """Items from one model version; `keys_attended`, `mass` and `corrections` are of searches."""

    items: list[AnsweredItemOut]
    model_version: str
    retrieval: str = Field(
        description="`exact`, or `coarse` where rows were approximated or left out."
    )
    degraded: bool = Field(
        description="True when a part that is down was left out: the model that was made current "
        "cannot be loaded, and an older one answers."
    )
    keys_attended: int | None = Field(None, description="Number of field keys that were attended.")
    mass: float | None = Field(
        None, description="Share of the softmax over all field keys that was attended."
    )
    rows_scanned: int | None = Field(
        None,
        description="Of a long history: the mean number of rows that were attended one by one for "
        "a target. Events on one item are one row.",
    )
    corrections: dict[str, list[str]] | None = Field(
        None, description="Words of the query, and the words that stand for them in the search."
    )
    spaces: list[Literal["content", "trained"]] | None = Field(
        None,
        description="Of similar items: the spaces in which the item was compared. A new item is "
        "in `content` alone until it was trained on, one without text in `trained` alone.",
    )


class AttendedOut(BaseModel):
    """Attended rows by descending mean weight."""

    rows: list[int]
    ids: list[str] | None = Field(
        description="Event ids of a user's memory, item ids of the catalogue; null otherwise."
    )
    weights: list[list[float]] = Field(description="For each head, the weight of each row.")
    context: list[float] = Field(description="Over all attended rows, whatever the limit.")
    mass: list[float] = Field(description="For each head, the share of the softmax attended.")
    retrieval: str = Field(
        description="`exact`, or `coarse` where rows were approximated or left out."
    )
    model_version: str | None


def answer_out(answer: Answer) -> dict[str, Any]:
    """Return the values of an `AnswerOut`. Raises `ArithmeticError` for a score of NaN."""
    check_finite("scores", [item["score"] for item in answer.items])
    items = [
        item
        if "explanation" not in item
        else {**item, "explanation": [_contribution(row) for row in item["explanation"]]}
        for item in answer.items
    ]
    out = fields_out(answer, items=items, corrections=answer.corrections or None)
    return {name: value for name, value in out.items() if value is not None}


def _contribution(row: Contribution) -> dict[str, Any]:
    check_finite("an explanation", (row.weight, row.contribution, row.effect or 0.0))
    out = fields_out(row, timestamp=written_time(row.timestamp))
    if row.effect is None:
        del out["effect"], out["effect_is_exact"]
    return out
