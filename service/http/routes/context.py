"""The context of a handler: the engine, the settings, the stage clock and strict JSON bodies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Set
from contextlib import AbstractAsyncContextManager
from json import JSONDecodeError
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope

from service.domain.records import parse_json
from service.domain.settings import Settings
from service.engine.engine import Engine
from service.http.bodies import MERGE_PATCH_TYPE, connection_of, media_type
from service.http.scope_keys import BODY, BULK_TURN, ENGINE, STAGES
from service.questions.scalars import Body
from service.runtime.tracing import StageClock
from service.runtime.work_queue import current_turn

T = TypeVar("T")

JSON_TYPES = frozenset({"application/json"})
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
