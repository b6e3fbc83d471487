"""Answers as the engine makes them and as clients read them.

They are plain dictionaries, because an answer holds up to hundreds of them; their types are the
documentation of the service. A member that a question does not produce is left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import Field
from typing_extensions import TypedDict

from service.questions.asked import EFFECTS_UP_TO
from service.questions.scalars import Id, WrittenTime


def doc(text: str, **more: Any) -> Any:
    return Field(description=text, **more)


RowKind = Literal["because", "trending", "newest", "again", "recommended", "popular"]


Space = Literal["content", "trained"]  # item vectors: of their text, or of the trained model


RetrievalOut = Annotated[
    Literal["exact", "coarse", "lists"],
    doc(
        "How memories were attended. `exact`: every row. `coarse`: for each target and head the "
        "rows that FAISS found. `lists`: FAISS's lists of a long memory, some rows exactly and "
        "the other lists by their summaries."
    ),
]


RowsScanned = Annotated[
    int,
    doc(
        "The mean number of rows of the person's memory that were attended one by one, for each "
        "head and target. In a long memory, events on one item are one row."
    ),
]


MemoryRows = Annotated[int, doc("Number of rows of the person's memory.")]


class ContributionOut(TypedDict):
    """Contribution of the events on one item, of one type, to one item's score.

    No two reasons of a score have the same item and type.
    """

    event_id: Annotated[
        str | None,
        doc(
            "Of the newest of the events; null of an event that is not stored, and of an interest."
        ),
    ]
    item_id: str | None
    title: str
    type: Annotated[
        str,
        doc(
            "Of the event, or `profile`. `hidden` is the sum of the events on items that were "
            "hidden or deleted, which are not named."
        ),
    ]
    timestamp: Annotated[WrittenTime | None, doc("Of the newest of the events.")]
    events: Annotated[
        int,
        doc(
            "The number of events on the item, of this type, that the reason sums up: those among "
            "the 2 `explain` + 8 events that contribute most, or as many more as it takes to name "
            "so many reasons."
        ),
    ]
    weight: Annotated[
        float, doc("The softmax weight, the mean over heads, summed over the events.")
    ]
    contribution: Annotated[
        float,
        doc(
            "What the events add to the score, or take from it where negative. Of each: what the "
            "attention loses where the other events take over its weight, its share of the "
            "transitions and similarities, and an equal share of what all events that raise the "
            "score add together. The sum over all events and profile entries is the score without "
            "`parts.prior`."
        ),
    ]
    effect: NotRequired[
        Annotated[
            float,
            doc(
                "What the score would lose, had the events never happened: the whole model "
                "counts, so that later events are read without them. Effects do not sum to the "
                "score. Of several events an estimate is the sum of what the score loses without "
                "each one alone, which can be far from what it loses without all of them. In "
                f"/v1/score of up to {EFFECTS_UP_TO} items unless `explain_effects` is false, "
                "elsewhere with `explain_effects` or `explain_exact`."
            ),
        ]
    ]
    effect_is_exact: NotRequired[
        Annotated[
            bool,
            doc(
                "False where `effect` is an estimate. `explain_exact` computes it, for several "
                "events by leaving out all at once, but for the older events of a long history, "
                "and for several events of one, which are always estimated."
            ),
        ]
    ]


class MarkedOut(TypedDict):
    """A span of a text."""

    text: str
    match: Annotated[bool, doc("Whether it is a word of the query.")]


class LikenessOut(TypedDict):
    """Similarity of an item to the item of the request, in one space."""

    cosine: float
    share: Annotated[float, doc("Share of the item's weight that this space holds.")]


class RemainderOut(TypedDict):
    """Events and profile entries that an explanation does not name, counted together."""

    events: int
    contribution: Annotated[
        float,
        doc(
            "Contributions, this remainder, `parts.prior`, `parts.rules` and `parts.reference` sum "
            "to the score; in a search, to that by which the memory re-ranks."
        ),
    ]


class AppliedRuleOut(TypedDict, total=False):
    """A rule of the question that holds for an item."""

    name: Required[str]
    boost: Annotated[
        float,
        doc("As the rule has it. The sum of these, in the unit of the score, is `parts.rules`."),
    ]
    bury: Annotated[bool, doc("True where it puts the item behind all others.")]


class AnsweredItemOut(TypedDict, total=False):
    """One item of an answer, without the fields that its route does not produce."""

    item_id: Required[Id]
    title: Required[str]
    score: Annotated[
        float,
        doc(
            "Left out in a list in the order of fields, and of a pinned item that a search did not "
            "compare."
        ),
    ]
    parts: Annotated[
        dict[str, float],
        doc(
            "The addends of the score, by name. Of a search: `match` of the text, `memory` of the "
            "user who is asked for, `rules`."
        ),
    ]
    reason: Annotated[
        str,
        doc(
            "`personal`: from a history, by the trained model; `content`: from a history, without "
            "a model; `popular`: without a history. In /v1/popular, what it ranks by; in items "
            "taken together, `after` or `basket`, and `content` for an item that is only similar."
        ),
    ]
    events: Annotated[int, doc("Of a ready question: the number of events that count.")]
    explanation: Annotated[
        list[ContributionOut],
        doc(
            "The events behind the score, by descending contribution: events that raise it come "
            "first, and events that lower it are listed only after all that raise it. In a search "
            "they explain the score that re-ranks, which is the one of /v1/score. Empty without a "
            "memory, and for items too far down to be re-ranked."
        ),
    ]
    remainder: Annotated[RemainderOut, doc("Beside an `explanation`.")]
    support: Annotated[
        int, doc("Users who took the item after the other one, or baskets with both.")
    ]
    lift: Annotated[
        float, doc("How many times as many these are as if both items were taken independently.")
    ]
    significance: Annotated[
        float,
        doc(
            "Log-likelihood ratio G² of both items: items below 6.63, which one in a hundred pairs "
            "reaches by chance, are left out."
        ),
    ]
    weight: Annotated[float, doc("The softmax weight over the item's keys.")]
    matched: Annotated[
        dict[str, float], doc("The share of the weight that each field's key holds.")
    ]
    highlights: Annotated[
        dict[str, list[MarkedOut]], doc("The title and a snippet of the description, as spans.")
    ]
    mass: Annotated[
        float, doc("Share of the softmax over the user's memory that was attended row by row.")
    ]
    relative_error: Annotated[
        float,
        doc(
            "Of a long history whose older events were not attended row by row: how far a head's "
            "context behind the score may be off, relative to its length, at 99 % confidence; the "
            "largest of the heads."
        ),
    ]
    spaces: Annotated[
        dict[Space, LikenessOut],
        doc(
            "Of a similar item: how it is, in each space where both items are. The score is log Σ "
            "exp(z) over them, z being the cosine in standard deviations above the mean of all "
            "offered items in that space. Where both spaces are compared, z of `trained` is "
            "multiplied by √(r r'), r = n / (n + 20) for an item of n training events."
        ),
    ]
    fields: Annotated[
        dict[str, Any], doc("The fields that were asked for, as far as the item has them.")
    ]
    rules: Annotated[
        list[AppliedRuleOut], doc("The rules that hold for the item; left out where none does.")
    ]
    moved: Annotated[
        Literal["pinned", "explored", "buried"],
        doc("Why the item does not stand where its score would put it."),
    ]
    propensity: Annotated[
        float,
        doc(
            "With `explore`: the probability of the item to be in the answer, 1 for what is not "
            "left to chance."
        ),
    ]


class FacetValueOut(TypedDict):
    """One value of a field."""

    value: str | float | bool | None
    count: Annotated[int, doc("Number of items that match and have it.")]


class FacetOut(TypedDict):
    """Values of a field over all items that match, the most frequent first."""

    field: str
    values: list[FacetValueOut]
    other: Annotated[int, doc("Sum of the counts of the values that are left out.")]
    min: NotRequired[Annotated[float | str, doc("The smallest number, or the first time.")]]
    max: NotRequired[Annotated[float | str, doc("The largest number, or the last time.")]]


class WarningOut(TypedDict):
    """A part of the question that no item of the catalogue meets, or a pin that is left out."""

    pointer: Annotated[str, doc("A JSON pointer (RFC 6901).", examples=["/filter/all/0/in/0"])]
    detail: Annotated[
        str, Field(examples=["no item has the category 'comdy'; did you mean 'comedy'?"])
    ]


class AnswerOut(TypedDict, total=False):
    """Items from one model version; `corrections` are of searches."""

    items: Required[list[AnsweredItemOut]]
    model_version: Required[str]
    retrieval: Required[RetrievalOut]
    degraded: Required[
        Annotated[
            bool,
            doc(
                "True when a part that is down was left out: the model that was made current "
                "cannot be loaded, and an older one answers; or the database of the store does "
                "not answer, and the answer is from what was known of the user, without event "
                "ids, `fields` and highlights, and by the last version of a scenario that was "
                "read."
            ),
        ]
    ]
    keys_attended: Annotated[
        int,
        doc(
            "Number of keys that were attended: of items' fields in a search, of items in each "
            "space for similar ones."
        ),
    ]
    mass: Annotated[
        float, doc("Share of the softmax over all these keys that the attended ones hold.")
    ]
    rows_scanned: RowsScanned
    memory_rows: MemoryRows
    candidates: Annotated[
        int,
        doc("Recommend: number of items whose scores were computed, of all that may be answered."),
    ]
    corrections: Annotated[
        dict[str, list[str]],
        doc(
            "Words of the query that no item has, and the words that are searched for in their "
            "place. Left out where all was searched for as it was typed."
        ),
    ]
    did_you_mean: Annotated[
        str,
        doc(
            "The query in another spelling, which was not searched for: an offer.",
            examples=["python for beginners"],
        ),
    ]
    spaces: Annotated[
        list[Space],
        doc(
            "Of similar items: the spaces in which the item was compared. A new item is in "
            "`content` alone until it was trained on, one without text in `trained` alone."
        ),
    ]
    total: Annotated[int, doc("With facets, and in a list: the number of items that match.")]
    cursor: Annotated[
        str, doc("Of a list or a search: the cursor of the next page; left out on the last one.")
    ]
    facets: Annotated[list[FacetOut], doc("In the order of the request.")]
    warnings: Annotated[list[WarningOut], doc("Left out where there is nothing to say.")]
    seed: Annotated[int, doc("With `explore`: the seed of its draws.")]


class ScenarioItemOut(AnsweredItemOut):
    """One item of an answer to a scenario."""

    scenario: NotRequired[
        Annotated[str, doc("The fallback that the item is from; left out of the scenario's own.")]
    ]


class ScenarioAnswerOut(AnswerOut):
    """The answer to a scenario: that of its question, filled up by its fallback."""

    items: list[ScenarioItemOut]  # type: ignore[misc]  # each is one of the question's too
    scenario: str
    scenario_version: int


class FoundEventOut(TypedDict):
    """One event, with what is answered of its item."""

    event_id: Annotated[
        str | None,
        doc(
            "Null for an event of the request's `history`, and where `degraded` is true because "
            "the store does not answer."
        ),
    ]
    item_id: Id
    title: str
    type: str
    timestamp: WrittenTime
    score: float
    parts: Annotated[
        dict[str, float],
        doc(
            "The addends of the score: `match` of the item with the query, and `recency` of the "
            "event, at most 0.5 / `temperature` and half of it at an age of 30 days."
        ),
    ]
    weight: Annotated[float, doc("The softmax weight of the event among all of the history.")]
    matched: Annotated[
        dict[str, float], doc("The share of the item's weight that each field's key holds.")
    ]
    highlights: NotRequired[
        Annotated[
            dict[str, list[MarkedOut]], doc("The title and a snippet of the description, as spans.")
        ]
    ]
    fields: NotRequired[
        Annotated[
            dict[str, Any], doc("The fields that were asked for, as far as the item has them.")
        ]
    ]


class FoundEventsOut(TypedDict):
    """The answer to a search with `"memory": "history"`, best event first."""

    events: list[FoundEventOut]
    model_version: str
    retrieval: Annotated[str, doc("`exact`, or `coarse` where keys were left out.")]
    degraded: Annotated[bool, doc("As in the answer to a search of the catalogue.")]
    keys_attended: Annotated[int, doc("Number of field keys that were attended.")]
    mass: Annotated[
        float,
        doc("Share of the softmax over the field keys of the history's items that was attended."),
    ]
    corrections: NotRequired[
        Annotated[
            dict[str, list[str]],
            doc("As in the answer to a search of the catalogue, whose words they are."),
        ]
    ]
    did_you_mean: NotRequired[Annotated[str, doc("The query in another spelling: an offer.")]]
    warnings: NotRequired[
        Annotated[list[WarningOut], doc("Left out where there is nothing to say.")]
    ]
    scenario: NotRequired[Annotated[str, doc("The scenario that was asked.")]]
    scenario_version: NotRequired[int]


class RowReasonOut(TypedDict, total=False):
    """Why a row is on the page."""

    kind: Required[
        Annotated[
            RowKind,
            doc(
                "`because`: one item of the history, or an interest, raises the scores of these "
                "items most; `trending`; `newest`; `again`: the user took them at several times; "
                "`recommended`; `popular`."
            ),
        ]
    ]
    text: Required[
        Annotated[str, doc("A sentence to show.", examples=["Because you watched Alien"])]
    ]
    item_id: Annotated[str, doc("Of `because`: that item.")]
    event_ids: Annotated[
        list[str], doc("Of `because`: the stored events on it that add most to the scores.")
    ]
    categories: Annotated[
        list[str], doc("Of `newest`: the user's categories, from which these items are.")
    ]


class RowOut(TypedDict):
    """One row of a page, best items first."""

    reason: RowReasonOut
    items: list[AnsweredItemOut]


class RowsOut(TypedDict, total=False):
    """Rows of a page, from one model version; no item is in two of them."""

    rows: Required[list[RowOut]]
    model_version: Required[str]
    retrieval: Required[RetrievalOut]
    rows_scanned: RowsScanned
    memory_rows: MemoryRows
    degraded: Required[bool]
    warnings: Annotated[list[WarningOut], doc("Left out where there is nothing to say.")]
    total: Annotated[int, doc("With facets: the number of items that may stand in a row.")]
    facets: Annotated[list[FacetOut], doc("In the order of the request.")]
    scenario: Annotated[str, doc("The scenario that was asked.")]
    scenario_version: int


class ItemEventOut(TypedDict):
    """One event of an item."""

    user_id: Id
    type: str
    timestamp: WrittenTime


class ItemEventsOut(TypedDict):
    """The newest events of an item, newest first."""

    events: list[ItemEventOut]
    total: Annotated[int, doc("Number of all events of the item.")]
    degraded: bool


class AudienceUserOut(TypedDict):
    """One user of an audience."""

    user_id: Id
    score: Annotated[
        float, doc("Of the item, above the level of the user's scores of the reference items.")
    ]
    parts: Annotated[dict[str, float], doc("The addends of the score, by name.")]
    reason: Annotated[str, doc("`personal`: by the trained model; `content`: without one.")]
    explanation: NotRequired[
        Annotated[
            list[ContributionOut],
            doc("The events that raise the score most. Left out with `explain` 0."),
        ]
    ]
    remainder: NotRequired[
        Annotated[
            RemainderOut, doc("The contribution of all other events. Left out with `explain` 0.")
        ]
    ]


class AudienceOut(TypedDict):
    """Users for an item, best first."""

    users: list[AudienceUserOut]
    model_version: str
    scored: Annotated[
        int,
        doc(
            "Number of users whose scores were compared. If these are fewer than the "
            "`candidates`, they are those with most events on items that the same users take, or "
            "that are similar."
        ),
    ]
    candidates: Annotated[int, doc("Number of users who may be in the audience.")]
    retrieval: RetrievalOut
    rows_scanned: NotRequired[RowsScanned]
    memory_rows: NotRequired[MemoryRows]
    degraded: bool


class AffinityOut(TypedDict):
    """One value of a field, as a user attends to it."""

    value: str | float | bool | None
    mass: Annotated[
        float,
        doc(
            "Softmax weight of the user's events on items with the value: the mean over heads and "
            "the 100 best items. An item with several values counts for each."
        ),
    ]
    score: Annotated[
        float | None,
        doc(
            "Mean score of items with the value, above that of all items, or of an even sample of "
            "many; null where none of these has the value."
        ),
    ]
    events: Annotated[int, doc("Number of events on items with the value.")]


class AffinitiesOut(TypedDict):
    """Values of a field, by falling attention."""

    field: str
    values: list[AffinityOut]
    model_version: str
    retrieval: RetrievalOut
    rows_scanned: NotRequired[RowsScanned]
    memory_rows: NotRequired[MemoryRows]
    degraded: bool


class AttendedEventOut(TypedDict):
    """The event, or the entry of a profile, that a row of a user's memory stands for."""

    event_id: Annotated[str | None, doc("Null for an entry of a profile.")]
    item_id: str | None
    title: str
    type: Annotated[
        str,
        doc(
            "The type of the event, or `profile`. An event on an item that was hidden or deleted "
            "is `hidden`, and not named."
        ),
    ]
    timestamp: WrittenTime | None


class AttendedOut(TypedDict):
    """Attended rows by descending mean weight."""

    rows: list[int]
    ids: Annotated[
        list[str] | None,
        doc(
            "Event ids of a user's memory, item ids of the catalogue; null otherwise. An event id "
            "is empty where the database does not answer."
        ),
    ]
    weights: Annotated[list[list[float]], doc("For each head, the weight of each row.")]
    context: Annotated[list[float], doc("Over all attended rows, whatever the limit.")]
    mass: Annotated[list[float], doc("For each head, the share of the softmax attended.")]
    retrieval: RetrievalOut
    rows_scanned: NotRequired[RowsScanned]
    memory_rows: NotRequired[MemoryRows]
    model_version: str | None
    degraded: Annotated[
        bool,
        doc(
            "As in the answer to a recommendation: newer events, and ids of events, may be missing."
        ),
    ]
    events: Annotated[
        list[AttendedEventOut] | None,
        doc("The rows of a user's memory, in the order of `rows`; null otherwise."),
    ]
