"""The context of a handler, strict JSON bodies, and what a row of the questions does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Set
from contextlib import AbstractAsyncContextManager
from json import JSONDecodeError
from typing import Annotated, Any, NamedTuple, TypeVar

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, ValidationError, WithJsonSchema
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain import keys
from service.domain.records import check_id, parse_json
from service.domain.settings import Settings
from service.engine import pipeline
from service.engine.engine import Engine
from service.http import problems
from service.http.limits import MERGE_PATCH_TYPE, connection_of, media_type, segment
from service.http.scope_keys import BODY, BULK_TURN, ENGINE, STAGES
from service.questions.scalars import ID_SCHEMA, Body, Params
from service.runtime.tracing import StageClock
from service.runtime.work_queue import current_turn

T = TypeVar("T")

JSON_TYPES = frozenset({"application/json"})
PathId = Annotated[
    str,
    AfterValidator(segment),
    AfterValidator(check_id),
    WithJsonSchema({**ID_SCHEMA, "description": "An id, percent-encoded; a slash in it as `%2F`."}),
]
_MANY = 200  # rows that are rendered beside the event loop
_LARGE = 4_096  # bytes of a body that is validated beside the event loop
_READING = frozenset({"ask", "attend", "scenarios"})  # tags of routes whose POST only reads


class Json(Response):
    """A JSON response written by orjson; numpy arrays and scalars are numbers to it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return `content` as JSON."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class Context(Request):
    """A request, and with it what a handler works with.

    It is the request itself, because FastAPI's solving of a dependency costs a fifth of all that it
    does for a small question. Its JSON is read strictly: no NaN, no numbers beyond floats, no
    surrogates.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        state = scope["app"].state
        self.settings: Settings = state.settings
        self.stages: StageClock = scope[STAGES]
        self._parsed: Any = None  # the body as its schema, once it is validated

    @property
    def engine(self) -> Engine:
        """The engine of the request's namespace: it answers, and holds the store.

        Only requests under `/v1/` have one.
        """
        engine: Engine = self.scope[ENGINE]
        return engine

    def bulk_turn(self) -> AbstractAsyncContextManager[object]:
        """A turn among the bulk work, of one batch of a stream; see `Admission`."""
        turn: Callable[[], AbstractAsyncContextManager[object]] = self.scope[BULK_TURN]
        return turn()

    async def body(self) -> bytes:
        """The body, which `Bodies` has read."""
        body: bytes = self.scope[BODY]
        return body

    async def json(self) -> Any:
        """The body. Raises `json.JSONDecodeError`, which the app answers with 422."""
        if self._parsed is not None:
            return self._parsed
        with self.stages("parse"):
            return parse_json(self.scope[BODY])

    async def validated(self, schema: Callable[[Any], T]) -> T:
        """Return the body by its schema. Raises RequestValidationError."""
        await self.parse(schema)
        if self._parsed is not None:
            parsed: T = self._parsed
            return parsed
        if not self.scope[BODY]:
            raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "required"}])
        try:
            document = await self.json()
        except JSONDecodeError as error:
            where = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}
            raise RequestValidationError(
                [{**where, "input": {}, "ctx": {"error": error.msg}}]
            ) from None
        try:
            return schema(document)
        except ValidationError as error:
            raise body_errors(error) from None

    async def parse(self, schema: Callable[[Any], Any]) -> None:
        """Validate a large body on a thread. Raises RequestValidationError."""
        turn = current_turn.get()
        if turn is None or len(self.scope[BODY]) <= _LARGE:
            return  # FastAPI validates it
        try:
            with self.stages("parse"):
                body, executor = self.scope[BODY], self.engine.executor
                async with turn.queue.json:
                    self._parsed = await turn.run(executor, lambda: schema(parse_json(body)))
        except JSONDecodeError:
            return
        except ValidationError as error:
            raise body_errors(error) from None

    async def render(self, make: Callable[[], Any], rows: int = 0) -> Response:
        """Return what `make` returns as JSON; many rows, or long work's, are made on a thread."""
        turn = current_turn.get()
        with self.stages("render"):
            if turn is None or not (turn.is_long or rows > _MANY):
                return Json(make())
            async with turn.queue.json:
                return await turn.run(self.engine.executor, lambda: Json(make()))


def check_media_type(scope: Scope, types: Set[str]) -> None:
    """Raise HTTPException (415) unless a body has one of these types."""
    if media_type(scope) not in types:
        raise HTTPException(415, "Send Content-Type: application/json, also with an empty body.")


def body_errors(error: ValidationError) -> RequestValidationError:
    """Return the errors of a body as FastAPI raises them."""
    return RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])


class JsonRoute(APIRoute):
    """A route whose handler may take the `Context`, and whose POST, PUT and PATCH take only JSON.

    PATCH takes it also as a merge patch. Any other type is a 415, also of an empty body: a page of
    another site can make a browser post to 127.0.0.1, but not with this type unless the service
    allows it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook around parsing, validation and the endpoint."""
        handler = super().get_route_handler()
        methods = self.methods or set()
        takes_json = not {"POST", "PUT", "PATCH"}.isdisjoint(methods)
        types = JSON_TYPES | ({MERGE_PATCH_TYPE} if "PATCH" in methods else set())
        is_question = self._is_question()
        model = None if self.body_field is None else self.body_field.field_info.annotation
        schema = None
        if isinstance(model, type) and issubclass(model, Body):
            schema = model.model_validate

        async def handle(request: Request) -> Response:
            context = Context(request.scope, request.receive)
            if takes_json:
                check_media_type(request.scope, types)
            if schema is not None:
                await context.parse(schema)
            if not is_question:
                return await handler(context)
            with connection_of(request.scope).cancels():
                return await handler(context)

        return handle

    def _is_question(self) -> bool:
        """True for routes that change nothing: their work is dropped when the client leaves."""
        methods = self.methods or set()
        if methods == {"POST"}:
            about = _READING.intersection(map(str, self.tags))
            return bool(about) or self.path.endswith("/similar")
        return methods <= {"GET"}


_ABOUT = re.compile(r"\{(\w+)\}")  # in a path, what a question is about


class Question(NamedTuple):
    """One question. `schema` is its body, or its query parameters if it is a GET."""

    path: str
    name: str  # of the operation, and of the method in generated clients
    schema: type[Body] | type[Params]
    ask: Callable[[pipeline.Request[Any]], Awaitable[Any]]
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

    def __init__(self, app: ASGIApp, *, questions: Iterable[Question]) -> None:
        self._app = app
        plain = (row for row in questions if row.method == "POST" and row.about is None)
        self._rows = {row.path: row for row in plain}

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
