"""The table of questions: one row registers a route, and batch, scenarios and scopes read it."""

from __future__ import annotations

from service.engine.attend import attend_memory
from service.engine.popular import answer_popular
from service.engine.recommend import recommend_items, score_items
from service.engine.related import item_events, items_together, similar_items
from service.engine.rows import answer_rows
from service.engine.search import answer_search
from service.engine.users import item_audience, user_affinities
from service.http.routes.context import Question, routes_of
from service.questions.answers import (
    AffinitiesOut,
    AnswerOut,
    AttendedOut,
    AudienceOut,
    FoundEventsOut,
    ItemEventsOut,
    RowsOut,
)
from service.questions.asked import RecommendIn, ScoreIn, SearchIn, SimilarIn, SimilarParams
from service.questions.attend import AttendIn
from service.questions.ready import (
    AffinitiesParams,
    AudienceParams,
    ItemEventsParams,
    PopularIn,
    RowsIn,
    TogetherIn,
    TogetherParams,
)

# Descriptions of routes, of which the first paragraph is the summary.
_SEARCH = """Search the catalogue by words and by meaning, best first, with the fields that matched.

A quoted part is a phrase that every result has; a word that ends with a star is a prefix. A
word that no item has stands for one of a title, which `corrections` reports; other spellings
are offered in `did_you_mean`. Item ids and the attributes in HEED_KEYWORD_FIELDS match as
wholes and by their beginnings, before anything else. If nothing matches, `warnings` says so.
With a user, results are re-ranked by their scores; `explain` names the events behind these.

Without a query, or with a `sort`, items are listed in the order of their fields instead, page
by page: all that pass the filter, or those of them that match.

With `"memory": "history"` the user's own events are searched by the texts of their items. The
answer has `events` in place of `items`: several on one item are several answers, of which newer
ones come first."""
_ROWS = """Make the rows of a home page: no item comes twice, and each row says why it is there.

Half of a user's rows are due to one item of their history each, chosen with the row's items by
what the item contributes to their scores, which `explanation` shows. Among them come what is
trending, what is new in the user's categories, and what they take again. Strangers get what is
popular, trending and new. A row that would have too few items is left out."""
_TOGETHER = """Rank what users take after an item, or at the same time, more often than by chance.

Items follow by the trained model's transition counts, or by those of the log where it has
none; `support` and `lift` are counted in the log. Items of similar content fill the list up,
with the reason `content`."""
_AUDIENCE = """Rank users for an item, best first, each with the events behind it.

If users are few, all are scored. Otherwise the hundred with most events on the item's neighbours
are, and `retrieval` is `coarse`."""
_LIKE = """Rank items by their similarity to one, in their texts and in the trained space.

Each item has a key in both spaces, and one softmax weighs all keys: `spaces` says how near each
item is in either, and which share of its weight that holds."""

_ASK = (
    Question(
        "/v1/score",
        "score",
        ScoreIn,
        score_items,
        AnswerOut,
        """Score the given items for a user or a session, in the order given.

        `parts` add up to the score; with `explain`, the events behind it are named.
        """,
    ),
    Question(
        "/v1/recommend",
        "recommend",
        RecommendIn,
        recommend_items,
        AnswerOut,
        "Recommend items of the catalogue that pass a filter, best first, each with its reason.",
        saved="recommend",
    ),
    Question(
        "/v1/search",
        "search",
        SearchIn,
        answer_search,
        AnswerOut | FoundEventsOut,
        _SEARCH,
        saved="search",
        brought={"query": "x", "user_id": "x"},
    ),
)
_ATTEND = (
    Question(
        "/v1/attend",
        "attend",
        AttendIn,
        attend_memory,
        AttendedOut,
        """Score each key against the query, apply the softmax, and average the values by it.""",
        tag="attend",
        statuses=(404,),
    ),
)
_READY = (
    Question(
        "/v1/popular",
        "popular",
        PopularIn,
        answer_popular,
        AnswerOut,
        """Rank items by the events of everybody: popular, trending, newest or best rated ones.

        Every event that was acknowledged counts, also right after a restart; forgotten ones do not.
        """,
        saved="popular",
        brought={"user_id": "x"},
    ),
    Question(
        "/v1/rows",
        "rows",
        RowsIn,
        answer_rows,
        RowsOut,
        _ROWS,
        saved="rows",
        lists_items=False,
    ),
    Question(
        "/v1/items/{item_id}/together",
        "items_together",
        TogetherParams,
        items_together,
        AnswerOut,
        _TOGETHER,
        statuses=(404,),
    ),
    Question(
        "/v1/items/{item_id}/together",
        "filtered_items_together",
        TogetherIn,
        items_together,
        AnswerOut,
        """Rank what users take after an item, or at the same time, with a filter and fields.""",
        statuses=(404,),
        saved="together",
    ),
    Question(
        "/v1/items/{item_id}/audience",
        "item_audience",
        AudienceParams,
        item_audience,
        AudienceOut,
        _AUDIENCE,
        statuses=(404,),
    ),
    Question(
        "/v1/users/{user_id}/affinities",
        "user_affinities",
        AffinitiesParams,
        user_affinities,
        AffinitiesOut,
        """List the values of a field by the attention that a user's events on them have.""",
    ),
)
_SIMILAR = (
    Question(
        "/v1/items/{item_id}/events",
        "item_events",
        ItemEventsParams,
        item_events,
        ItemEventsOut,
        "List the newest events of an item, of all users.",
        tag="items",
        statuses=(404,),
        is_batched=False,
    ),
    Question(
        "/v1/items/{item_id}/similar",
        "similar_items",
        SimilarParams,
        similar_items,
        AnswerOut,
        _LIKE,
        tag="items",
        statuses=(404,),
    ),
    Question(
        "/v1/items/{item_id}/similar",
        "filtered_similar_items",
        SimilarIn,
        similar_items,
        AnswerOut,
        """Rank items by their similarity to one, with a filter, facets and fields in the body.""",
        tag="items",
        statuses=(404,),
        saved="similar",
    ),
)
QUESTIONS = (*_ASK, *_ATTEND, *_SIMILAR, *_READY)


def saved_questions() -> dict[str, Question]:
    """Return the questions that scenarios save, those that answer a list of items first."""
    rows = sorted(QUESTIONS, key=lambda row: not row.lists_items)
    return {row.saved: row for row in rows if row.saved}


ask_router, attend_router, ready_router, similar_router = map(
    routes_of, (_ASK, _ATTEND, _READY, _SIMILAR)
)
