"""What every route stands on: the engine it asks, the clock it is timed by, how bodies are read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.domain.queries import (
    Answer,
    AttendQuery,
    AttendResult,
    RecommendQuery,
    ScoreQuery,
    SearchQuery,
    SimilarQuery,
)
from service.domain.records import Event, Item, User
from service.domain.settings import Settings
from service.domain.stage_clock import StageClock
from service.http.telemetry import STAGES
from service.stores.base import Appended


class Engine(Protocol):
    """The jobs behind the routes. It raises the errors of `errors`, and knows no HTTP."""

    @property
    def model_version(self) -> str:
        """The version that answers now."""

    # ---- write
    async def put_items(self, items: Sequence[Item], *, unhurried: bool = False) -> int:
        """Insert or replace, all or nothing; how many."""

    async def get_item(self, item_id: str) -> Item:
        """One item. Raises `NotFound`."""

    async def delete_item(self, item_id: str) -> None:
        """Take one item out. Raises `NotFound`."""

    async def page_items(self, cursor: str | None, limit: int) -> tuple[list[Item], str | None]:
        """A page and the cursor of the next. Raises `Invalid` at `/cursor`."""

    async def ingest(self, events: Sequence[Event]) -> Appended:
        """Append, all or nothing; durable when it returns. Raises `Conflict`."""

    async def put_user(self, user: User) -> None:
        """Insert or replace a profile."""

    async def get_user(self, user_id: str) -> User:
        """A profile. Raises `NotFound`."""

    async def page_users(self, cursor: str | None, limit: int) -> tuple[list[User], str | None]:
        """A page and the cursor of the next. Raises `Invalid` at `/cursor`."""

    async def history(
        self, user_id: str, cursor: str | None, limit: int
    ) -> tuple[list[Event], str | None]:
        """A page, newest first, and the cursor of the next. Raises `Invalid` at `/cursor`."""

    async def delete_event(self, user_id: str, event_id: str) -> None:
        """Forget one event. Raises `NotFound`."""

    async def forget(self, user_id: str) -> int:
        """Forget a user, history and profile; how many events that were."""

    async def merge(self, user_id: str, source: str) -> int:
        """Move the history and profile of `source` to `user_id`; how many events moved."""

    # ---- ask
    async def score(self, query: ScoreQuery, stages: StageClock) -> Answer:
        """Score targets."""

    async def recommend(self, query: RecommendQuery, stages: StageClock) -> Answer:
        """Recommend items."""

    async def search(self, query: SearchQuery, stages: StageClock) -> Answer:
        """Search items by text."""

    async def similar(self, query: SimilarQuery, stages: StageClock) -> Answer:
        """Items like one. Raises `NotFound`."""

    async def attend(self, query: AttendQuery, stages: StageClock) -> AttendResult:
        """The bare operator."""

    # ---- run
    async def train(self, options: Mapping[str, Any]) -> str:
        """Start training; the job's id. Raises `Conflict` while one runs, `Invalid`."""

    async def job(self, job_id: str) -> Mapping[str, Any]:
        """State, progress and result of a job. Raises `NotFound`."""

    async def models(self) -> list[Mapping[str, Any]]:
        """The versions with their metrics."""

    async def activate(self, version: str) -> Mapping[str, Any]:
        """Serve this version. Raises `NotFound`, `ModelRejected`."""

    async def ready(self) -> tuple[bool, Mapping[str, Any]]:
        """Whether store and model answer, and what each said."""

    async def stats(self) -> Mapping[str, float]:
        """Numbers worth a gauge: sizes, counts, hits."""

    async def close(self) -> None:
        """Let go of the store and of everything else."""


class Context(Request):
    """A request, and with it what a handler works with.

    It is the request itself, because FastAPI's solving of a dependency costs a fifth of all that it
    does for a small question. Its JSON is read strictly: no NaN, no numbers beyond floats, no
    surrogates.
    """

    @property
    def engine(self) -> Engine:
        """The jobs."""
        engine: Engine = self.app.state.engine
        return engine

    @property
    def settings(self) -> Settings:
        """Of the service."""
        settings: Settings = self.app.state.settings
        return settings

    @property
    def stages(self) -> StageClock:
        """The clock of this request."""
        stages: StageClock = self.scope[STAGES]
        return stages

    async def json(self) -> Any:
        """The body. Raises `json.JSONDecodeError`, which the app answers with 422."""
        body = await self.body()
        with self.stages("parse"):
            return orjson.loads(body)


class JsonRoute(APIRoute):
    """A route whose handler may ask for the `Context`, and that takes its body as JSON.

    It says so (415) when the body is called something else.

    The type is required for safety too: a page of some other site can make a browser post to
    127.0.0.1, but not with this type unless we allow it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook around parsing, validation and the endpoint."""
        handler, reads = super().get_route_handler(), self.body_field is not None

        async def handle(request: Request) -> Response:
            context = Context(request.scope, request.receive)
            if (
                reads
                and not _is_json(context.headers.get("content-type", ""))
                and await context.body()
            ):
                raise HTTPException(415, "The body must be sent as Content-Type: application/json.")
            return await handler(context)

        return handle


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"
