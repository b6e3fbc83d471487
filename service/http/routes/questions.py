"""The questions that a scenario may save: schema and handler of each, one line a question."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Any, NamedTuple

from starlette.responses import Response

from service.http.routes import ask, items, ready
from service.http.routes.context import Context
from service.http.schemas.base import Body
from service.http.schemas.questions.ask import RecommendIn, SearchIn
from service.http.schemas.questions.popular import PopularIn
from service.http.schemas.questions.rows import RowsIn
from service.http.schemas.questions.similar import SimilarIn
from service.http.schemas.questions.together import TogetherIn


class SavableQuestion(NamedTuple):
    """One question, as its own route takes and answers it."""

    schema: type[Body]
    handler: Callable[..., Awaitable[Response]]  # of (body, context), or (id, body, context)
    about: str | None = None  # the field with the id that the question is about
    # Fields that a request brings; what is saved is checked together with these.
    brought: Mapping[str, Any] = {}
    lists_items: bool = True  # whether its answer is one list of items, as far as the kind says

    def fills_up(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the answer to a question with these fields is one list of items."""
        return self.lists_items and fields.get("memory") != "history"

    def check(self, body: Any, saved: Set[str]) -> None:
        """Raise `Invalid` for saved fields that do not go together; the others are brought."""
        body = self.schema.model_construct(_fields_set={*saved}, **vars(body))
        body.to_query() if self.about is None else body.to_query("x")

    async def answer(self, body: Any, about: str | None, context: Context) -> Response:
        """Answer a question; `about` is the id, where the question is about one."""
        if self.about is None:
            return await self.handler(body, context)
        return await self.handler(about, body, context)


QUESTIONS: Mapping[str, SavableQuestion] = {
    "recommend": SavableQuestion(RecommendIn, ask.recommend),
    "search": SavableQuestion(SearchIn, ask.search, brought={"query": "x", "user_id": "x"}),
    "similar": SavableQuestion(SimilarIn, items.filtered_similar_items, "item_id"),
    "popular": SavableQuestion(PopularIn, ready.popular, brought={"user_id": "x"}),
    "together": SavableQuestion(TogetherIn, ready.filtered_items_together, "item_id"),
    "rows": SavableQuestion(RowsIn, ready.rows, lists_items=False),
}
