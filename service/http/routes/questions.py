"""The table of questions: one row registers a route, and batch, scenarios and scopes read it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain import keys
from service.domain.settings import Settings
from service.engine.attend import attend_memory
from service.engine.pipeline import Request
from service.engine.popular import answer_popular
from service.engine.recommend import recommend_items, score_items
from service.engine.related import item_events, items_together, similar_items
from service.engine.rows import answer_rows
from service.engine.search import answer_search
from service.engine.users import item_audience, user_affinities
from service.http import problems
from service.http.bodies import connection_of
from service.http.routes.context import JSON_TYPES, Context, JsonRoute, check_media_type
from service.http.routes.record_bodies import PathId
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
from service.questions.scalars import Body, Params

_ABOUT = re.compile(r"\{(\w+)\}")  # in a path, what a question is about


class Question(NamedTuple):
    """One question. `schema` is its body, or its query parameters if it is a GET."""

    path: str
    name: str  # of the operation, and of the method in generated clients
    schema: type[Body] | type[Params]
    ask: Callable[[Request[Any]], Awaitable[Any]]
    answer: Any  # the type of its answer, which is documented
    text: str
    scope: keys.Scope = "read"
    tag: str = "ask"
    statuses: tuple[int, ...] = ()  # of problems of its own
    saved: str = ""  # the name by which scenarios save it, if they do
    # Members that a request brings; what a scenario saves is checked together with these.
    brought: Mapping[str, Any] = {}
    is_batched: bool = True  # whether a batch takes it
    lists_items: bool = True  # whether its answer is one list of items, as far as the kind says

    @property
    def method(self) -> str:
        """The method of its route."""
        return "POST" if issubclass(self.schema, Body) else "GET"

    @property
    def about(self) -> str | None:
        """The name of the id that the question is about, None for one about no item or user."""
        named = _ABOUT.search(self.path)
        return None if named is None else named[1]

    def fills_up(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the answer to a question with these fields is one list of items."""
        return self.lists_items and fields.get("memory") != "history"

    def check(self, body: Any, saved: Set[str], settings: Settings) -> None:
        """Raise `Invalid` for saved fields that do not go together; the others are brought."""
        self.schema.model_construct(_fields_set={*saved}, **vars(body)).check(settings)

    async def respond(self, body: Any, about: str, context: Context) -> Response:
        """Answer a body, or parameters, about an item or a user."""
        asked = getattr(body, "as_body", body)
        answer = await context.engine.ask(self.ask, asked, context.stages, about=about)
        return await context.render(lambda: answer)


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


def routes_of(rows: tuple[Question, ...]) -> APIRouter:
    """Return the routes of some questions."""
    router = APIRouter(route_class=JsonRoute)
    for row in rows:
        router.add_api_route(
            row.path,
            _endpoint(row),
            methods=[row.method],
            name=row.name,
            description=inspect.cleandoc(row.text),
            tags=[row.tag],
            responses={200: {"model": row.answer}, **problems.documented(*row.statuses)},
        )
    return router


def _endpoint(row: Question) -> Callable[..., Awaitable[Response]]:
    """Return the function of a route, with the parameters that FastAPI reads."""

    async def endpoint(body: Any, context: Context, **about: str) -> Response:
        return await row.respond(body, "".join(about.values()), context)

    schema = row.schema if row.method == "POST" else Annotated[row.schema, Query()]
    types: dict[str, Any] = {"body": schema, "context": Context}
    if row.about is not None:
        types[row.about] = PathId
    endpoint.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
            for name, annotation in types.items()
        ]
    )
    return endpoint


class PlainQuestions:
    """The innermost middleware: answers the POST of a question that is about no item or user.

    FastAPI describes these routes. Its matching of routes and solving of dependencies would take a
    fifth of the time of a small question.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        rows = (row for row in QUESTIONS if row.method == "POST" and row.about is None)
        self._rows = {row.path: row for row in rows}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        row = None
        if scope["type"] == "http" and scope["method"] == "POST":
            row = self._rows.get(scope["path"].removeprefix(scope["root_path"]))
        if row is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = row
        check_media_type(scope, JSON_TYPES)
        context = Context(scope, receive)
        with connection_of(scope).cancels():
            body = await context.validated(row.schema.model_validate)
            response = await row.respond(body, "", context)
        await response(scope, receive, send)


ask_router, attend_router, ready_router, similar_router = map(
    routes_of, (_ASK, _ATTEND, _READY, _SIMILAR)
)
