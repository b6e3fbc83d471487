"""Answers to questions: their documented shape, and their values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from service.domain.item_selection import FacetResult
from service.domain.queries import Answer, AnswerItem, Contribution
from service.http.schemas.questions.ask import EFFECTS_UP_TO
from service.http.schemas.rendering import check_finite, fields_out, written_time
from service.http.schemas.scalars import Id, Timestamp

RetrievalOut = Annotated[
    Literal["exact", "coarse", "lists"],
    Field(
        description="How memories were attended. `exact`: every row. `coarse`: for each target "
        "and head the rows that FAISS found. `lists`: FAISS's lists of a long memory, some rows "
        "exactly and the other lists by their summaries."
    ),
]
RowsScanned = Annotated[
    int | None,
    Field(
        description="The mean number of rows of the person's memory that were attended one by "
        "one, for each head and target. In a long memory, events on one item are one row."
    ),
]
MemoryRows = Annotated[int | None, Field(description="Number of rows of the person's memory.")]


class ContributionOut(BaseModel):
    """Contribution of the events on one item, of one type, to one item's score.

    No two reasons of a score have the same item and type.
    """

    event_id: str | None = Field(
        description="Of the newest of the events; null of an event that is not stored, and of an "
        "interest."
    )
    item_id: str | None
    title: str
    type: str = Field(
        description="Of the event, or `profile`. `hidden` is the sum of the events on items that "
        "were hidden or deleted, which are not named."
    )
    timestamp: Timestamp | None = Field(description="Of the newest of the events.")
    events: int = Field(
        description="The number of events on the item, of this type, that the reason sums up: "
        "those among the 2 `explain` + 8 events that contribute most, or as many more as it takes "
        "to name so many reasons."
    )
    weight: float = Field(
        description="The softmax weight, the mean over heads, summed over the events."
    )
    contribution: float = Field(
        description="What the events add to the score, or take from it where negative. Of each: "
        "what the attention loses where the other events take over its weight, its share of the "
        "transitions and similarities, and an equal share of what all events that raise the score "
        "add together. The sum over all events and profile entries is the score without "
        "`parts.prior`."
    )
    effect: float | None = Field(
        None,
        description="What the score would lose, had the events never happened: the whole model "
        "counts, so that later events are read without them. Effects do not sum to the score. Of "
        "several events an estimate is the sum of what the score loses without each one alone, "
        "which can be far from what it loses without all of them. In "
        f"/v1/score of up to {EFFECTS_UP_TO} items unless `explain_effects` is false, elsewhere "
        "with `explain_effects` or `explain_exact`.",
    )
    effect_is_exact: bool | None = Field(
        None,
        description="False where `effect` is an estimate. `explain_exact` computes it, for several "
        "events by leaving out all at once, but for the older events of a long history, and for "
        "several events of one, which are always estimated.",
    )


class MarkedOut(BaseModel):
    """A span of a text."""

    text: str
    match: bool = Field(description="Whether it is a word of the query.")


class LikenessOut(BaseModel):
    """Similarity of an item to the item of the request, in one space."""

    cosine: float
    share: float = Field(description="Share of the item's weight that this space holds.")


class RemainderOut(BaseModel):
    """Events and profile entries that an explanation does not name, counted together."""

    events: int
    contribution: float = Field(
        description="Contributions, this remainder, `parts.prior`, `parts.rules` and "
        "`parts.reference` sum to the score; in a search, to that by which the memory re-ranks."
    )


class AppliedRuleOut(BaseModel):
    """A rule of the question that holds for an item."""

    name: str
    boost: float | None = Field(
        None,
        description="As the rule has it. The sum of these, in the unit of "
        "the score, is `parts.rules`.",
    )
    bury: bool | None = Field(None, description="True where it puts the item behind all others.")


class AnsweredItemOut(BaseModel):
    """One item of an answer, without the fields that its route does not produce."""

    item_id: Id
    title: str
    score: float | None = Field(
        None,
        description="Left out in a list in the order of fields, and of a pinned item that a search "
        "did not compare.",
    )
    parts: dict[str, float] | None = Field(
        None,
        description="The addends of the score, by name. Of a search: `match` of the text, `memory` "
        "of the user who is asked for, `rules`.",
    )
    reason: str | None = Field(
        None,
        description="`personal`: from a history, by the trained model; `content`: from a history, "
        "without a model; `popular`: without a history. In /v1/popular, what it ranks by; in items "
        "taken together, `after` or `basket`, and `content` for an item that is only similar.",
    )
    events: int | None = Field(
        None, description="Of a ready question: the number of events that count."
    )
    explanation: list[ContributionOut] | None = Field(
        None,
        description="The events behind the score, by descending contribution: events that raise it "
        "come first, and events that lower it are listed only after all that raise it. In a search "
        "they explain the score that re-ranks, which is the one of /v1/score. Empty without a "
        "memory, and for items too far down to be re-ranked.",
    )
    remainder: RemainderOut | None = Field(None, description="Beside an `explanation`.")
    support: int | None = Field(
        None, description="Users who took the item after the other one, or baskets with both."
    )
    lift: float | None = Field(
        None,
        description="How many times as many these are as if both items were taken independently.",
    )
    significance: float | None = Field(
        None,
        description="Log-likelihood ratio G² of both items: items below 6.63, which one in a "
        "hundred pairs reaches by chance, are left out.",
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
        "all offered items in that space. Where both spaces are compared, z of `trained` is "
        "multiplied by √(r r'), r = n / (n + 20) for an item of n training events.",
    )
    fields: dict[str, Any] | None = Field(
        None, description="The fields that were asked for, as far as the item has them."
    )
    rules: list[AppliedRuleOut] | None = Field(
        None, description="The rules that hold for the item; left out where none does."
    )
    moved: Literal["pinned", "explored", "buried"] | None = Field(
        None, description="Why the item does not stand where its score would put it."
    )
    propensity: float | None = Field(
        None,
        description="With `explore`: the probability of the item to be in the answer, 1 for what "
        "is not left to chance.",
    )


class FacetValueOut(BaseModel):
    """One value of a field."""

    value: str | float | bool | None
    count: int = Field(description="Number of items that match and have it.")


class FacetOut(BaseModel):
    """Values of a field over all items that match, the most frequent first."""

    field: str
    values: list[FacetValueOut]
    other: int = Field(description="Sum of the counts of the values that are left out.")
    min: float | str | None = Field(None, description="The smallest number, or the first time.")
    max: float | str | None = Field(None, description="The largest number, or the last time.")


class WarningOut(BaseModel):
    """A part of the question that no item of the catalogue meets, or a pin that is left out."""

    pointer: str = Field(examples=["/filter/all/0/in/0"], description="A JSON pointer (RFC 6901).")
    detail: str = Field(examples=["no item has the category 'comdy'; did you mean 'comedy'?"])


class AnswerOut(BaseModel):
    """Items from one model version; `corrections` are of searches."""

    items: list[AnsweredItemOut]
    model_version: str
    retrieval: RetrievalOut
    degraded: bool = Field(
        description="True when a part that is down was left out: the model that was made current "
        "cannot be loaded, and an older one answers; or the database of the store does not answer, "
        "and the answer is from what was known of the user, without event ids, `fields` and "
        "highlights, and by the last version of a scenario that was read."
    )
    keys_attended: int | None = Field(
        None,
        description="Number of keys that were attended: of items' fields in a search, of items in "
        "each space for similar ones.",
    )
    mass: float | None = Field(
        None, description="Share of the softmax over all these keys that the attended ones hold."
    )
    rows_scanned: RowsScanned = None
    memory_rows: MemoryRows = None
    candidates: int | None = Field(
        None,
        description="Recommend: number of items whose scores were computed, of all that may be "
        "answered.",
    )
    corrections: dict[str, list[str]] | None = Field(
        None,
        description="Words of the query that no item has, and the words that are searched for in "
        "their place. Left out where all was searched for as it was typed.",
    )
    did_you_mean: str | None = Field(
        None,
        description="The query in another spelling, which was not searched for: an offer.",
        examples=["python for beginners"],
    )
    spaces: list[Literal["content", "trained"]] | None = Field(
        None,
        description="Of similar items: the spaces in which the item was compared. A new item is "
        "in `content` alone until it was trained on, one without text in `trained` alone.",
    )
    total: int | None = Field(
        None, description="With facets, and in a list: the number of items that match."
    )
    cursor: str | None = Field(
        None,
        description="Of a list or a search: the cursor of the next page; left out on the last one.",
    )
    facets: list[FacetOut] | None = Field(None, description="In the order of the request.")
    warnings: list[WarningOut] | None = Field(
        None, description="Left out where there is nothing to say."
    )
    seed: int | None = Field(None, description="With `explore`: the seed of its draws.")


class ScenarioItemOut(AnsweredItemOut):
    """One item of an answer to a scenario."""

    scenario: str | None = Field(
        None, description="The fallback that the item is from; left out of the scenario's own."
    )


class ScenarioAnswerOut(AnswerOut):
    """The answer to a scenario: that of its question, filled up by its fallback."""

    items: list[ScenarioItemOut]  # type: ignore[assignment]  # each is one of the question's too
    scenario: str
    scenario_version: int


def answer_out(answer: Answer) -> dict[str, Any]:
    """Return the values of an `AnswerOut`. Raises `ArithmeticError` for a score of NaN."""
    out = fields_out(answer, items=items_out(answer.items), corrections=answer.corrections or None)
    if answer.facets is not None:
        out["facets"] = facets_out(answer.facets)
    return {name: value for name, value in out.items() if value is not None}


def items_out(answered: Sequence[AnswerItem]) -> list[Any]:
    """Return the values of `AnsweredItemOut`s. Raises `ArithmeticError` for a score of NaN."""
    check_finite("scores", [item["score"] for item in answered if "score" in item])
    return explanations_out(answered)


def explanations_out(answered: Sequence[Any]) -> list[Any]:
    """Return entries of an answer with their explanations as JSON, where they have any."""
    explained = [each for item in answered for each in item.get("explanation", ())]
    if not explained:
        return list(answered)
    check_finite("weights", [each.weight for each in explained])
    check_finite("contributions", [each.contribution for each in explained])
    check_finite("effects", [each.effect for each in explained if each.effect is not None])
    rows: dict[int, dict[str, Any]] = {}
    return [
        item
        if "explanation" not in item
        else {**item, "explanation": [_contribution(each, rows) for each in item["explanation"]]}
        for item in answered
    ]


def facets_out(facets: Sequence[FacetResult]) -> list[dict[str, Any]]:
    """Return the values of `FacetOut`s."""
    return [_facet(facet) for facet in facets]


def _facet(facet: FacetResult) -> dict[str, Any]:
    values = [{"value": value, "count": count} for value, count in facet.values]
    out = {"field": facet.field, "values": values, "other": facet.other}
    if facet.minimum is not None:
        out |= {"min": facet.minimum, "max": facet.maximum}
    return out


def _contribution(of: Contribution, rows: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Write a contribution; `rows` holds the written rows of this answer, by `id`."""
    row = rows.get(id(of.row))
    if row is None:
        row = fields_out(of.row, timestamp=written_time(of.row.timestamp))
        rows[id(of.row)] = row
    out = {**row, "events": of.events, "weight": of.weight, "contribution": of.contribution}
    if of.effect is not None:
        out |= {"effect": of.effect, "effect_is_exact": of.effect_is_exact}
    return out
